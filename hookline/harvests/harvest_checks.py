"""Checks of a harvest, before it stores anything.

- `places_in(model, where)`: the places; raises for those that a forward has not
- `refuse_unfit(model)`: raises for a model that is spread over ranks, or has no weights yet
- `warn_of_training(model)`: warns that values depend on chance
- `warn_of_order(sizes, samples)`: warns that rows may not be samples
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from hookline.engine.offloading import is_offloaded
from hookline.errors import HarvestError, warn_outside
from hookline.places.grammar import Place, is_gradient
from hookline.places.resolution import Where
from hookline.places.tree import walk
from hookline.selecting import select
from hookline.torch_private import BatchNormBase, DropoutBase

__all__ = ["places_in", "refuse_unfit", "warn_of_order", "warn_of_training"]


def places_in(model: nn.Module, where: Where) -> list[Place]:
    """Return the places that are asked for; raise for those that a forward has not."""
    places = select(model, where)
    for place in places:
        if is_gradient(place.port) or place.port == "value":
            raise HarvestError(
                f"A harvest of {str(place)!r} was asked for.",
                "It is a gradient."
                if is_gradient(place.port)
                else "It is the same for every batch.",
                "Name outputs or inputs of modules. Only the forward runs.",
            )
    return places


def refuse_unfit(model: nn.Module) -> None:
    """Raise for a model that one rank cannot run alone, or that has no weights yet."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found = _why_unfit(model, name, tensor)
        if found is not None:
            raise HarvestError(f"A harvest of a {type(model).__name__} was asked for.", *found)


def _why_unfit(model: nn.Module, name: str, tensor: Tensor) -> tuple[str, str] | None:
    """Return why nothing can be harvested from a model with such a tensor, and what to do."""
    if nn.parameter.is_lazy(tensor):
        found = f"Its {name!r} has no shape yet, and would be drawn anew at each start."
        return found, "Run the model once, and load its weights."
    if hasattr(tensor, "placements"):
        found = f"Its {name!r} is spread over ranks, which would have to run in step."
        return found, "Give each rank a whole model, or capture batch by batch into a Store."
    if tensor.is_meta and not is_offloaded(model, tensor, name):
        return f"Its {name!r} is on the meta device, without data.", "Load its weights."
    return None


def warn_of_training(model: nn.Module) -> None:
    """Warn if a layer of the model drops values at random or normalizes by the batch."""

    def random(module: nn.Module) -> bool:
        drops = isinstance(module, DropoutBase) and getattr(module, "p", 0.0) > 0
        return (drops or isinstance(module, BatchNormBase)) and module.training

    found = [name for name, module in walk(model) if random(module)]
    if found:
        warn_outside(
            f"The model is in training mode: {found[0]!r} makes values that depend on chance or on "
            f"the rest of the batch. Call model.eval() first."
        )


def warn_of_order(sizes: Iterable[int], samples: int) -> None:
    """Warn of rows that may not be samples, since no tensor in the batch has as many."""
    lengths = sorted(set(sizes))
    if lengths and samples not in lengths:
        warn_outside(
            f"The tensors of the first batch have {' or '.join(map(str, lengths))} in their first "
            f"dimension, and the values {samples}: these may not be samples, and would be numbered "
            "as such. Bring samples to the front with transform=, or give ids=."
        )
