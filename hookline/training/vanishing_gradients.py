"""Find gradients that vanish or explode on their way from the output to the first layers.

- `judge_depths(sizes)`: the gradients that are far too small or too large beside the later ones
- `advise_on(share)`: advice by the relative size
"""

from __future__ import annotations

from statistics import median

__all__ = ["advise_on", "judge_depths"]

VANISHING = 1e-5  # of the gradient of a later layer, here and in all layers before
LOST = 1e-8  # the same, here alone
FADING = 0.01, 0.7  # of the gradient of the next layer, for some layers in a row
ROW = 5  # of them
EXPLODING = 1e3  # times the gradient of the later layers
Shares = dict[int, float]


def judge_depths(sizes: list[float]) -> tuple[Shares, Shares]:
    """Return the gradients that are too small, and those that are too large, by their number.

    The value of each is its size relative to the later ones.

    >>> judge_depths([1e-9, 1.0, 1.0]), judge_depths([1e6, 1.0, 1.0])
    (({0: 1e-09}, {}), ({}, {0: 1000000.0}))
    """
    small: Shares = {}
    large: Shares = {}
    faded = _faded(sizes)
    reached = 0.0  # the largest gradient up to here
    for at, size in enumerate(sizes[:-1]):
        later = sizes[at + 1 :]
        reached = max(reached, size)
        # A gradient that reaches a layer before it was not lost on the way: those of the queries
        # and keys of attention are small by nature. It may have come by another way, though, if it
        # has become less from layer to layer here.
        lost = reached < VANISHING * max(later) or size < LOST * max(later)
        if lost or faded[at] < VANISHING:
            small[at] = size / max(later)
            continue
        # A gradient that has grown was small near the output; the layers in between may be
        # small by nature, as residual branches that begin with zeros.
        usual = max(median(later), *later[len(later) // 2 :])
        if size > EXPLODING * usual > 0:
            large[at] = size / usual
    return small, large


def advise_on(share: float) -> str:
    """Return what to try for a gradient of that size relative to the later ones."""
    if share > 1:
        return "Initialise with smaller weights, use normalisation layers, or clip gradients."
    if not share:
        return (
            "Look for what stops it behind: units that are dead, a factor of zero, numbers too "
            "small for the dtype, an expert that is never chosen."
        )
    return (
        "Use normalisation layers, residual connections, ReLU or GELU in place of sigmoid and "
        "tanh, or an initialisation that suits the activation."
    )


def _faded(sizes: list[float]) -> list[float]:
    """Return the shares that are left of gradients that shrink from layer to layer; 1 for others.

    >>> [round(share, 5) for share in _faded([1.0, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0])]
    [1.0, 1e-05, 0.0001, 1.0, 1.0, 1.0, 1.0]
    """
    found, first, (least, most) = [1.0] * len(sizes), len(sizes) - 1, FADING
    for at in range(len(sizes) - 2, -1, -1):
        if not least * sizes[at + 1] < sizes[at] < most * sizes[at + 1]:
            first = at
        elif first - at >= ROW - 1:
            found[at] = sizes[at] / sizes[first]
    return found
