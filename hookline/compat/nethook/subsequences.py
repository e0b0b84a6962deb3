"""A part of a Sequential, as a Sequential of its own.

- `subsequence(sequential, first_layer, last_layer, …)`: the layers from one to another
"""

from __future__ import annotations

import copy
import difflib
from collections import OrderedDict
from typing import NamedTuple

from torch import nn

from hookline.errors import PlaceError
from hookline.torch_private import submodules_of

__all__ = ["subsequence"]


class _End(NamedTuple):
    """The end of a subsequence: a layer, and whether it is a part of it."""

    name: str
    inclusive: bool
    depth: int = 0

    @property
    def step(self) -> str:
        return self.name.split(".")[self.depth]

    @property
    def inner(self) -> _End | None:
        """Return the same end inside the layer at this step; None if that is the named one
        itself.
        """
        deeper = self.name.count(".") > self.depth
        return self._replace(depth=self.depth + 1) if deeper else None

    @property
    def skip(self) -> int:
        """Return how many layers of this step are left out."""
        return int(self.inner is None and not self.inclusive)


def subsequence(
    sequential: nn.Module,
    first_layer: str | None = None,
    last_layer: str | None = None,
    after_layer: str | None = None,
    upto_layer: str | None = None,
    single_layer: str | None = None,
    share_weights: bool = False,
) -> nn.Module:
    """Return the layers of a Sequential from one to another, under their names.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> subsequence(model, first_layer="1", last_layer="2")
    Sequential(
      (1): ReLU()
      (2): Linear(in_features=3, out_features=1, bias=True)
    )

    Args:
        sequential: a Sequential; a dotted name leads into Sequentials inside it. Where no layer is
            named, any module, and the result is the whole.
        first_layer: begin with this one; or `after_layer`: begin after it.
        last_layer: end with this one; or `upto_layer`: end before it.
        after_layer: see `first_layer`.
        upto_layer: see `last_layer`.
        single_layer: this one only.
        share_weights: use the very modules of `sequential`; otherwise they are copied.

    The result is in training or evaluation mode as `sequential` is. Weights that are tied inside
    the part are tied in the copy.
    """
    if single_layer is not None:
        if not first_layer is last_layer is after_layer is upto_layer is None:
            raise PlaceError(
                f"single_layer={single_layer!r} was given together with another layer.",
                "It is both ends of the subsequence already.",
                "Give single_layer alone.",
            )
        first_layer = last_layer = single_layer
    begin = _end("first_layer", first_layer, "after_layer", after_layer)
    end = _end("last_layer", last_layer, "upto_layer", upto_layer)
    part = sequential
    if begin is not None or end is not None:
        if not isinstance(sequential, nn.Sequential):
            raise _not_sequential("", sequential)
        part = _cut(sequential, begin, end)
    # All at once, so that what is shared between the layers stays shared.
    return part if share_weights else copy.deepcopy(part)


def _end(one: str, inclusive: str | None, other: str, exclusive: str | None) -> _End | None:
    if inclusive is not None and exclusive is not None:
        raise PlaceError(
            f"{one}={inclusive!r} and {other}={exclusive!r} were given.",
            "Both say where the subsequence has the same end.",
            f"Give {one} to have the layer in it, or {other} to leave it out.",
        )
    name = exclusive if inclusive is None else inclusive
    return None if name is None else _End(name, inclusive is not None)


def _cut(module: nn.Sequential, begin: _End | None, end: _End | None) -> nn.Sequential:
    names = list(submodules_of(module))
    low = 0 if begin is None else _position(names, begin)
    high = len(names) - 1 if end is None else _position(names, end)
    if low > high and begin is not None and end is not None:
        raise PlaceError(
            f"The layers from {begin.name!r} to {end.name!r} were asked for.",
            f"{begin.name!r} comes after {end.name!r}.",
            "Exchange them.",
        )
    low += 0 if begin is None else begin.skip
    high -= 0 if end is None else end.skip
    chosen: OrderedDict[str, nn.Module] = OrderedDict()
    for name in names[low : high + 1]:
        inner_begin = begin.inner if begin is not None and begin.step == name else None
        inner_end = end.inner if end is not None and end.step == name else None
        child = submodules_of(module)[name]
        if inner_begin is not None or inner_end is not None:
            if not isinstance(child, nn.Sequential):
                raise _not_sequential(name, child)
            child = _cut(child, inner_begin, inner_end)
            if not child:
                continue
        chosen[name] = child
    part = nn.Sequential(chosen)
    part.training = module.training
    return part


def _position(names: list[str], end: _End) -> int:
    if end.step in names:
        return names.index(end.step)
    close = difflib.get_close_matches(end.step, names, n=3, cutoff=0.4) or names[:8]
    raise PlaceError(
        f"The layer {end.name!r} was asked for.",
        f"It is not in the Sequential, where {end.step!r} was looked for. "
        f"Closest: {', '.join(map(repr, close)) or 'none: it is empty'}.",
        "List the layers with module_names(sequential).",
    )


def _not_sequential(name: str, module: nn.Module) -> PlaceError:
    what = f"The layer {name!r}" if name else "The module"
    return PlaceError(
        f"{what} was to be cut.",
        f"It is a {type(module).__name__}, not a Sequential.",
        "Name layers of a Sequential, or of Sequentials inside it.",
    )
