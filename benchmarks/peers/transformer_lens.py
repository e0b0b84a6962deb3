"""TransformerLens, as in its README: a TransformerBridge around a model of transformers."""

from __future__ import annotations

import copy
import re

from transformer_lens.model_bridge import TransformerBridge

PACKAGE = "transformer_lens"
TITLE = "TransformerLens"
SOURCE = "README; docstrings of boot_transformers, run_with_cache, run_with_hooks of 4.3.0"
HOME = "gpt2"
NOTES = {
    "setup": "boot_transformers; it replaces modules of the model, so it is given a copy",
    "capture": "runs its own attention: values agree to rounding, not bit by bit",
}
ABSENT = {
    "inputs": "hook points of its own, not any module",
    "operation": "hook points of its own",
    "summary": "none",
    "to_disk": "none",
    "edit_parameter": "none",
    "calls": "the cache keeps the last call of a hook point",
}
ROUNDING = True


def boot(model):
    if not hasattr(model, "generate"):
        raise NotImplementedError("language models of known architectures only")
    from peers.models import tokenizer

    return TransformerBridge.boot_transformers(
        "gpt2", hf_model=copy.deepcopy(model), tokenizer=tokenizer(), device="cpu"
    )


def point(name):
    """Its name for the output of a block."""
    found = re.fullmatch(r"transformer\.h\.(\d+)", name)
    return f"blocks.{found[1]}.hook_out" if found else name


def capture(model, names):
    bridge, points = boot(model), [point(name) for name in names]

    def run(ids):
        _, cache = bridge.run_with_cache(ids, names_filter=points)
        return {name: cache[place] for name, place in zip(names, points, strict=True)}

    return run


def edit(model, name, change):
    bridge = boot(model)

    def run(ids):
        return bridge.run_with_hooks(
            ids, fwd_hooks=[(point(name), lambda value, hook: change(value))]
        )

    return run


def gradient(model, name):
    bridge = boot(model)

    def run(ids):
        kept = []
        with bridge.hooks(bwd_hooks=[(point(name), lambda value, hook: kept.append(value))]):
            bridge(ids).sum().backward()
        return kept[0][0] if isinstance(kept[0], tuple) else kept[0]

    return run


def stop(model, name):
    bridge = boot(model)
    layer = int(name.rpartition(".")[2]) + 1

    def run(ids):
        _, cache = bridge.run_with_cache(ids, names_filter=[point(name)], stop_at_layer=layer)
        return cache[point(name)]

    return run


def generate(model, names, steps):
    bridge, points = boot(model), [point(name) for name in names]

    def run(ids):
        kept = {place: [] for place in points}
        hooks = [(place, lambda value, hook: kept[hook.name].append(value)) for place in points]
        with bridge.hooks(fwd_hooks=hooks):
            bridge.generate(
                ids, max_new_tokens=steps, do_sample=False, stop_at_eos=False, verbose=False
            )
        return {name: kept[place] for name, place in zip(names, points, strict=True)}

    return run
