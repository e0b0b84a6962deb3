"""Write one self-contained HTML page about a record, a store, a run or a model: `report`.

- `report(subject, to)`: write the page
- `page_of(subject)`: the page before it becomes HTML
- `kind_of(folder)`: the kind of thing that a folder holds
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from hookline.captures.record import Record
from hookline.errors import ReportError
from hookline.storage.saved_records import load_record
from hookline.storage.store import Store
from hookline.training.run_files import segments_in
from hookline.training.run_reading import Run
from hookline.view.model_pages import page_of_model
from hookline.view.page import Page
from hookline.view.page_html import as_html
from hookline.view.record_pages import BUDGET, page_of_record
from hookline.view.run_pages import page_of_run
from hookline.view.store_pages import page_of_store

__all__ = ["kind_of", "page_of", "report"]

Loss = Callable[[Any], Tensor]


def report(
    subject: Any,
    to: str | os.PathLike[str] = "report.html",
    *,
    batch: Any = None,
    loss: Loss | None = None,
    model: nn.Module | None = None,
    title: str | None = None,
    budget: int = BUDGET,
) -> Path:
    """Write one HTML file that shows a record, a store, a run or a model; no network is needed.

    >>> import tempfile, torch, hookline as hl
    >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    >>> with hl.capture(model, "*", "*:grad_output") as record:
    ...     model(torch.randn(8, 1, 8, 8)).square().mean().backward()
    >>> hl.report(record, tempfile.mkdtemp() + "/report.html").name
    'report.html'

    Args:
        subject: A `Record`, a `Store` or the folder of one, a `Run` or its folder, or a model.
        to: The file; it is replaced if it is there.
        batch: For a model: the batch of one run, which leaves no trace (a tensor, a tuple of
            arguments, or a dict of them by name). Without it the page has the parameters only.
        loss: For a model with a batch: a function of the model's output that returns the number
            whose gradients are shown. `.grad` of the parameters is left as it is.
        model: For a record, store or run: its model, for the tree with types and sizes. A record
            knows its model as long as that lives.
        title: The title of the page; by default the name of the model's class or of the folder.
        budget: About how many bytes the pictures may take before they are compressed. If it does
            not suffice, every n-th value is shown, and the page says so.

    Returns:
        The path of the file. Statistics are of all values up to two million a tensor.
    """
    page = page_of(subject, batch=batch, loss=loss, model=model, budget=budget)
    if title is not None:
        page.content["title"] = title
    path = Path(to)
    try:
        path.write_text(as_html(page), encoding="utf-8", newline="\n")  # as its digest has it
    except OSError as error:
        raise ReportError(
            f"A report was to be written to {str(path)!r}.",
            f"It cannot be: {error.strerror}.",
            "Give a file in a folder that is there and may be written to.",
        ) from error
    return path


def page_of(
    subject: Any,
    *,
    batch: Any = None,
    loss: Loss | None = None,
    model: nn.Module | None = None,
    budget: int = BUDGET,
) -> Page:
    """Return the page of a subject, before it becomes HTML: plain JSON and arrays."""
    if isinstance(subject, nn.Module):
        if loss is not None and batch is None:
            raise ReportError(
                "A report with a loss was asked for.",
                "There is no batch, so the model is not run.",
                "Give a batch too, or leave out loss=.",
            )
        return page_of_model(subject, batch, loss, budget)
    if batch is not None or loss is not None:
        raise ReportError(
            "A report with a batch or a loss was asked for.",
            f"The subject is a {type(subject).__name__}, which is not run.",
            "Leave them out, or give the model itself.",
        )
    if isinstance(subject, (str, os.PathLike)):
        subject = _open(Path(cast("str", subject)))
    if isinstance(subject, Record):
        return page_of_record(subject, model, budget)
    if isinstance(subject, Store):
        return page_of_store(subject, model, budget)
    if isinstance(subject, Run):
        return page_of_run(subject, model, budget)
    raise ReportError(
        "A report was asked for.",
        f"The subject is a {type(subject).__name__}.",
        "Give a record, a store, a run, the folder of one of these, or a model; "
        "hookline.view.figures draws attention patterns, sweeps and statistics.",
    )


def kind_of(folder: Path) -> str | None:
    """Return what is in a folder: a `store`, a `record`, a `run`, or None."""
    if (folder / "store.json").is_file():
        return "store"
    if (folder / "record.json").is_file():
        return "record"
    return "run" if segments_in(folder) else None


def _open(folder: Path) -> Store | Run | Record:
    """Open what is in a folder."""
    kind = kind_of(folder)
    if kind is None:
        raise ReportError(
            f"A report of {str(folder)!r} was asked for.",
            "There is no store, run or record in it." if folder.is_dir() else "It is no folder.",
            "Give the folder that harvest, watch or save_record has written.",
        )
    return {"store": Store.open, "record": load_record, "run": Run}[kind](folder)
