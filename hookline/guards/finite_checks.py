"""Check whether the numbers in a tensor are finite, and describe them.

- `finite_probe(tensor)`: one number that is finite if the tensor is, without waiting for a device
- `is_bad(tensor)`: return True if a tensor holds a NaN or an infinity; exact
- `bad_leaves(value)`: the tensors of a nested value that do, with their paths
- `is_mask(tensor)`: return True for an additive mask, of zeros and -inf only
- `infinity_signs(tensor)`: the signs of its infinities
- `TensorDescription`: shape, dtype, counts and range of a tensor, in one line of text
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hookline.values.nested import Path, leaves
from hookline.values.quantisation import dequantised
from hookline.values.sharding import local
from hookline.values.snapshots import is_fake, is_wrapped
from hookline.values.tables import describe

__all__ = [
    "TensorDescription",
    "all_finite",
    "bad_leaves",
    "finite_probe",
    "float_values",
    "infinity_signs",
    "is_bad",
    "is_mask",
]

_PLAIN = (torch.float32, torch.bfloat16, torch.float64)


def float_values(tensor: Tensor) -> Tensor | None:
    """Return the floating-point numbers of a tensor, detached; None if there are none to read."""
    if is_wrapped(tensor) or is_fake(tensor):
        return None
    tensor = local(tensor.detach())
    if tensor.is_meta or tensor.is_quantized:
        return None
    tensor = dequantised(tensor)  # a library's kind: what it is scaled by may be bad
    if tensor.layout != torch.strided or tensor.is_nested:
        try:
            tensor = tensor.coalesce() if tensor.is_sparse else tensor
            # A nested tensor may be a part of another's memory.
            tensor = (tensor.contiguous() if tensor.is_nested else tensor).values()
        except (RuntimeError, NotImplementedError):  # a layout without values of its own
            return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    return tensor if tensor.itemsize > 1 else tensor.float()  # 8 bits: few operations take them


def finite_probe(tensor: Tensor, exact: bool = False) -> Tensor | None:
    """Return one number that is finite if all numbers of a tensor are; None if it has none.

    It is the sum. A sum may overflow, so a bad probe has to be verified; a good one is certain.
    For float16, where sums often overflow, and with `exact`, it is made of the least and the
    greatest number, which takes two or three times as long.
    """
    if (
        not exact and type(tensor) is Tensor and tensor.dtype in _PLAIN and not tensor.is_meta
        and tensor.layout is torch.strided and not tensor.is_nested and not is_wrapped(tensor)
    ):  # fmt: skip
        # The commonest case without the checks; a sum of bfloat16 is taken in float32 inside.
        return tensor.detach().sum()
    found = float_values(tensor)
    if found is None:
        return None
    if exact or found.dtype == torch.float16:
        least, greatest = torch.aminmax(found)
        return 0 * least + 0 * greatest
    return found.sum()


def all_finite(probes: Iterable[Tensor]) -> bool:
    """Return True if all probes are finite, with one check and one transfer a device."""
    grouped: dict[torch.device, list[Tensor]] = {}
    for one in probes:
        grouped.setdefault(one.device, []).append(one.float() if one.itemsize < 4 else one)
    for found in grouped.values():
        if len(found) == 1:
            if not math.isfinite(found[0].item()):
                return False
        elif not torch.stack([one.double() for one in found]).isfinite().all().item():
            return False
    return True


def is_bad(tensor: Tensor | None) -> bool:
    """Return True if a tensor holds a NaN or an infinity.

    >>> is_bad(torch.tensor([1.0, float("inf")])), is_bad(torch.tensor([3e38, 3e38]))
    (True, False)
    """
    found = None if tensor is None else float_values(tensor)
    if found is None:
        return False
    # aminmax is several times faster than isfinite on the CPU, and passes NaN on.
    least, greatest = torch.aminmax(found)
    return not (math.isfinite(least.item()) and math.isfinite(greatest.item()))


def bad_leaves(value: Any) -> list[tuple[Path, Tensor]]:
    """Return the tensors of a nested value that hold a NaN or an infinity, with their paths."""
    return [(path, tensor) for path, tensor in leaves(value) if is_bad(tensor)]


def is_mask(tensor: Tensor) -> bool:
    """Return True for an additive mask: every number is 0 or -inf, and there are both.

    >>> is_mask(torch.full((3, 3), -torch.inf).triu(1)), is_mask(torch.tensor([-torch.inf, 2.0]))
    (True, False)
    """
    found = float_values(tensor)
    if found is None:
        return False
    zero, infinite = found == 0, found == -math.inf
    return bool((zero | infinite).all() and zero.any() and infinite.any())


def infinity_signs(tensor: Tensor) -> frozenset[str]:
    """Return the signs of the infinities in a tensor, "+" and "-", and "n" for a NaN."""
    found = float_values(tensor)
    if found is None:
        return frozenset()
    there = {"+": found == math.inf, "-": found == -math.inf, "n": found.isnan()}
    return frozenset(sign for sign, where in there.items() if where.any())


@dataclass(frozen=True)
class TensorDescription:
    """The counts and the range of a tensor's numbers, and where the first bad one is.

    >>> print(TensorDescription.of(torch.tensor([[1.0, 2.0], [float("nan"), 4.0]])))
    (2, 2) float32: 1 NaN of 4, first at [1, 0]; finite from 1 to 4, mean 2.333
    >>> print(TensorDescription.of(torch.zeros(3)))
    (3,) float32: all 0
    """

    kind: str  # shape and dtype
    count: int = 0
    nan: int = 0
    positive: int = 0  # +inf
    negative: int = 0  # -inf
    zeros: int = 0
    first: tuple[int, ...] | None = None  # where the first bad one stands
    least: float | None = None
    greatest: float | None = None
    mean: float | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorDescription:
        """Describe a tensor by all its numbers."""
        kind, found = describe(tensor), float_values(tensor)
        if found is None:
            return cls(kind, tensor.numel() if not tensor.is_nested else 0)
        finite = found.isfinite()
        good = found[finite]
        wrong = (~finite).nonzero()
        ends = (None, None, None)
        if good.numel():
            least, greatest = torch.aminmax(good)
            ends = least.item(), greatest.item(), good.double().mean().item()
        return cls(
            kind,
            found.numel(),
            int(found.isnan().sum()),
            int((found == math.inf).sum()),
            int((found == -math.inf).sum()),
            int((found == 0).sum()),
            tuple(int(n) for n in wrong[0]) if len(wrong) else None,
            *ends,
        )

    @property
    def bad(self) -> int:
        """The number of NaN and infinite numbers."""
        return self.nan + self.positive + self.negative

    def counts(self) -> str:
        """Return the bad numbers in words: `3 NaN and 1 -Inf of 12`."""
        named = ((self.nan, "NaN"), (self.positive, "+Inf"), (self.negative, "-Inf"))
        return f"{' and '.join(f'{n} {name}' for n, name in named if n)} of {self.count}"

    def __str__(self) -> str:
        said: list[str] = []
        if self.bad:
            where = f", first at {list(self.first)}" if self.first else ""
            said.append(self.counts() + where)
        if self.least is not None and self.greatest is not None:
            finite = "finite " if self.bad else ""
            if self.least == self.greatest:
                said.append(f"{finite or 'all '}{self.least:.4g}")
            else:
                zeros = f", {self.zeros} zeros" if self.zeros else ""
                said.append(
                    f"{finite}from {self.least:.4g} to {self.greatest:.4g}, "
                    f"mean {self.mean:.4g}{zeros}"
                )
        elif self.bad:
            said.append("nothing finite")
        return f"{self.kind}: {'; '.join(said)}" if said else self.kind

    def to_dict(self) -> dict[str, Any]:
        """Return all fields for JSON."""
        return asdict(self)
