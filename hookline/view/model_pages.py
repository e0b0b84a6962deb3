"""Make the page of a model: its parameters and costs, and with a batch the values of one run.

- `page_of_model(model, batch, loss, …)`: the page
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from hookline.captures.capturing import capture
from hookline.captures.record import Record
from hookline.costs.module_sizes import copy_uninitialized, has_uninitialized
from hookline.costs.summarizing import summarize
from hookline.isolation.backward import backward_roots, backward_without_grads, grad_mode
from hookline.isolation.batches import copy_batch
from hookline.isolation.isolated_runs import isolated
from hookline.isolation.model_calls import run_model
from hookline.isolation.module_index import ModuleIndex
from hookline.places.grammar import Place
from hookline.places.tree import join, tensors_of, walk
from hookline.view.page import Page
from hookline.view.page_tree import PageTree
from hookline.view.record_pages import add_record, facts_of, gather, page_of_tree, share
from hookline.view.tensor_summaries import summarize_value

__all__ = ["page_of_model"]

Loss = Callable[[Any], Tensor]


def page_of_model(model: nn.Module, batch: Any, loss: Loss | None, budget: int) -> Page:
    """Make the page of a model; with a batch, of one run of it, and with a loss, of its
    gradients.
    """
    held = ModuleIndex(model).tensors
    if batch is not None and has_uninitialized(held):
        model = copy_uninitialized(model, held)  # a run would give them their shapes
        with isolated(ModuleIndex(model)):
            run_model(model, copy_batch(batch))
    summary = summarize(model, batch)
    tree = PageTree(summary)
    tensors = [(path, pair) for path, module in walk(model) for pair in tensors_of(module)]
    ran = (batch is not None) + (loss is not None)
    most = share(budget, len(tensors) + ran * len(tree.modules))
    if batch is not None:
        add_record(tree, _observe(model, batch, loss, most), most)
    for path, (name, tensor) in tensors:
        place = Place(join(path, name), "value")
        if nn.parameter.is_lazy(tensor):
            tree.entry(place, note="It has no shape before the first run.", count=0)
        else:
            gather(tree, place, [tensor], most)
    run_so = "one run" + " with gradients" * bool(loss)
    return page_of_tree(
        tree,
        kind="model",
        title=summary.model,
        subtitle="parameters only" if batch is None else run_so,
        item="call",
        facts=facts_of(summary),
    )


def _observe(model: nn.Module, batch: Any, loss: Loss | None, most: int) -> Record:
    """Run a model without a trace; the record holds summaries instead of values."""
    where = ["", "**"] if any(True for _ in model.children()) else [""]
    if loss is not None:
        where += [f"{place}:grad_output" for place in where]
    watched = capture(model, *where, transform=partial(summarize_value, most=most), detach=True)
    with isolated(model), grad_mode(loss is not None), watched as record:
        result = run_model(model, copy_batch(batch))
        if loss is not None:
            backward_without_grads(backward_roots(loss(result)))
    return record
