"""The work that is measured: what is asked of every library, and how its answer is checked.

- `TASKS`: the tasks, in the order of the tables
- `Task.build(peer, large)` gives a `Work`: the bare model's run, the use, and the check, which a
  large one does without
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformer

from peers import models, raw

GENERATED = 8  # tokens
BATCHES = 4  # that go to disk


@dataclass
class Work:
    bare: Callable[[], object]
    make: Callable[[], Callable[[], object]]  # what is done once; gives the use
    right: Callable[[Any], bool]  # is what a use gave right?
    gradients: bool = False


@dataclass(frozen=True)
class Task:
    name: str
    title: str
    verb: str
    build: Callable[[ModuleType, bool], Work]
    has_memory: bool = True


def close(peer: ModuleType, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, bit by bit unless the library computes in another way."""
    if getattr(peer, "ROUNDING", False):
        return a.shape == b.shape and torch.allclose(a, b, atol=1e-5)
    return torch.equal(a, b)


def plain(large: bool):
    return models.plain(models.LARGE if large else transformer.TINY)


def captures(peer: ModuleType, model, batch, names, large: bool = False) -> Work:
    expected = {} if large else raw.capture(model, names)(batch)

    def make():
        run = peer.capture(model, names)
        return lambda: run(batch)

    def right(found):
        return all(close(peer, found[name], expected[name]) for name in names)

    return Work(lambda: model(batch), make, right)


def blocks(peer: ModuleType, large: bool) -> Work:
    return captures(peer, *plain(large), models.plain_blocks(), large)


def everything(peer: ModuleType, large: bool) -> Work:
    model, batch = plain(large)
    return captures(peer, model, batch, models.plain_modules(model), large)


def gpt2(peer: ModuleType, large: bool) -> Work:
    return captures(peer, *models.gpt2(), models.gpt2_blocks())


def halve(value):
    return value * 0.5


def edit(peer: ModuleType, large: bool) -> Work:
    model, batch = plain(large)
    expected = None if large else raw.edit(model, "blocks.5", halve)(batch)

    def make():
        run = peer.edit(model, "blocks.5", halve)
        return lambda: run(batch)

    return Work(lambda: model(batch), make, lambda found: close(peer, found, expected))


def gradient(peer: ModuleType, large: bool) -> Work:
    model, batch = plain(large)
    with torch.enable_grad():
        expected = None if large else raw.gradient(model, "blocks.5")(batch)

    def make():
        run = peer.gradient(model, "blocks.5")
        return lambda: run(batch)

    def right(found):
        return found.shape == expected.shape and torch.allclose(found, expected, atol=1e-6)

    return Work(lambda: model(batch).sum().backward(), make, right, gradients=True)


def stop(peer: ModuleType, large: bool) -> Work:
    model, batch = plain(large)
    expected = None if large else raw.capture(model, ["blocks.2"])(batch)["blocks.2"]

    def make():
        run = peer.stop(model, "blocks.2")
        return lambda: run(batch)

    return Work(lambda: model(batch), make, lambda found: close(peer, found, expected))


def summary(peer: ModuleType, large: bool) -> Work:
    model, batch = plain(large)

    def make():
        run = peer.summary(model)
        return lambda: run(batch)

    def right(text):
        return all(word in text for word in ("Embedding", "LayerNorm", "Linear", "SiLU"))

    return Work(lambda: model(batch), make, right)


def generate(peer: ModuleType, large: bool) -> Work:
    model, ids = models.gpt2()
    names = models.gpt2_blocks()
    expected = raw.generate(model, names, GENERATED)(ids)

    def make():
        run = peer.generate(model, names, GENERATED)
        return lambda: run(ids)

    def right(found):
        return all(
            len(found[name]) == GENERATED
            and all(close(peer, a, b) for a, b in zip(found[name], expected[name], strict=True))
            for name in names
        )

    settings = {"max_new_tokens": GENERATED, "min_new_tokens": GENERATED, "do_sample": False}
    return Work(lambda: model.generate(ids, **settings), make, right)


def disk(peer: ModuleType, large: bool) -> Work:
    model, batch = models.plain(models.LARGE if large else transformer.LARGE)
    batches = [batch.roll(shift, 0) for shift in range(BATCHES)]
    names = models.plain_blocks()
    checked = [] if large else batches
    expected = [raw.capture(model, names)(one)["blocks.7"] for one in checked]
    folder = Path(tempfile.mkdtemp())
    state = {"number": 0}

    def bare():
        for one in batches:
            model(one)

    def make():
        run = peer.to_disk(model, names)

        def use():
            state["number"] += 1
            target = str(folder / str(state["number"]))
            run(batches, target)
            return run, target

        return use

    def right(found):
        run, target = found
        return torch.equal(run.read(target, "blocks.7"), torch.cat(expected))

    return Work(bare, make, right)


TASKS = (
    Task("blocks", "capture 12 blocks", "capture", blocks),
    Task("all", "capture 161 modules", "capture", everything),
    Task("edit", "edit a layer", "edit", edit),
    Task("gradient", "gradient of a layer", "gradient", gradient),
    Task("stop", "stop after block 3 of 12", "stop", stop),
    Task("summary", "summary", "summary", summary),
    Task("gpt2", "GPT-2: capture 12 blocks", "capture", gpt2, has_memory=False),
    Task("generate", "GPT-2: every step of generate", "generate", generate, has_memory=False),
    Task("disk", "12 blocks of 4 batches to disk", "to_disk", disk),
)
