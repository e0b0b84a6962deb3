"""What it takes to put hooks on a model and off again, however large it is.

- `race(modules)`: `capture`, `edit` and `hook` beside hooks by hand, in a model of that size
- `rows(races)`: what that took, with the goal
- `show(rows)`: the same as a table

Nothing runs in between. The model has 12 blocks with an `mlp` each, and all its other modules are
in a tree beside them, so that the same modules are meant in a model of any size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from timing import Race
from torch import Tensor, nn

import hookline as hl

SIZES = (100, 1_000, 10_000)
PLACES = {"literal": "h.3.mlp", "glob": "h.*.mlp"}
BLOCKS, TIMES, WIDTH = 12, 20, 10


def tree(modules: int) -> nn.Module:
    """A module that holds so many others, no more than ten in each."""
    made = nn.Module()
    left, below = modules, min(modules, WIDTH)
    for number in range(below):
        share = left // (below - number)
        made.add_module(f"part{number}", tree(share - 1))
        left -= share
    return made


def build(modules: int) -> nn.Module:
    """A model of so many modules."""
    model = nn.Module()
    blocks = [nn.ModuleDict({"mlp": nn.Identity()}) for _ in range(BLOCKS)]
    model.add_module("h", nn.ModuleList(blocks))
    model.add_module("rest", tree(modules - 3 - 2 * BLOCKS))
    assert sum(1 for _ in model.modules()) == modules
    return model


def keep_output(kept: dict[str, object], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: object, output: Tensor) -> None:
        kept[name] = output

    return hook


def by_hand(model: nn.Module, names: list[str]) -> None:
    """Put a hook on each module and take it off."""
    kept: dict[str, object] = {}
    found = [(name, model.get_submodule(name)) for name in names]
    handles = [module.register_forward_hook(keep_output(kept, name)) for name, module in found]
    for handle in handles:
        handle.remove()


def look(value: object) -> None:
    """What `hook` calls."""


def attached(make: Callable[[], Any]) -> None:
    """Enter and leave."""
    make().attach().remove()


def often(run: Callable[[], None]) -> None:
    for _ in range(TIMES):
        run()


def race(modules: int) -> Race:
    """The three verbs at a literal place and at a glob, and hooks by hand, in one race."""
    model = build(modules)
    variants: dict[str, Callable[[], object]] = {}
    for kind, where in PLACES.items():
        names = [str(place) for place in hl.select(model, where)]
        ways: dict[str, Callable[[], None]] = {
            "raw": partial(by_hand, model, names),
            "capture": partial(attached, partial(hl.capture, model, where)),
            "edit": partial(attached, partial(hl.edit, model, where, hl.scale(2.0))),
            "hook": partial(attached, partial(hl.hook, model, where, look)),
        }
        variants |= {f"{way} {kind}": partial(often, run) for way, run in ways.items()}
    made = Race(variants)
    made.warm_up(2)
    return made


def rows(races: dict[int, Race]) -> list[dict[str, Any]]:
    """For each size and kind of place: what each way took in µs, and the most that it may take."""
    found: list[dict[str, Any]] = []
    for modules, timed in races.items():
        for kind, where in PLACES.items():
            taken = {
                way: timed.fast(f"{way} {kind}") / TIMES
                for way in ("raw", "capture", "edit", "hook")
            }
            most = 3 * taken["raw"] + 20
            place = {"modules": modules, "kind": kind, "place": where}
            found.append(place | {"us": taken, "at_most_us": most})
    return found


def show(found: list[dict[str, Any]]) -> None:
    """Print a table."""
    ways = ("raw", "capture", "edit", "hook")
    print("\nput on and taken off, µs" + "".join(f"{way:>9}" for way in ways) + "   goal")
    for row in found:
        taken = "".join(f"{row['us'][way]:9.1f}" for way in ways)
        met = all(row["us"][way] <= row["at_most_us"] for way in ways)
        told = f"≤ {row['at_most_us']:.0f} {'pass' if met else 'miss'}"
        print(f"{row['modules']:10,}  {row['place']:12}{taken}   {told}")
