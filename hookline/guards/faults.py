"""The report of a guard on numbers that are not finite.

- `Fault`: the place, its producer, its inputs, and the line of the program
- `explain(fault)`: the error
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from hookline.errors import NonFiniteError
from hookline.guards.origins import ADDING, Labelled, Origin
from hookline.isolation.backward import REENTRANT
from hookline.places.grammar import Place

__all__ = ["Fault", "explain", "fault_of"]

_ZERO = "At 0 it has no finite slope: add a small number inside, as in sqrt(x + 1e-8)."
_LOG = "The log of 0 is -Inf, of less NaN: clamp its argument, or use log_softmax or logsigmoid."
_ROW = "A row that is all -Inf leaves nothing to attend to: let every row keep one entry."
_DIVIDE = "Where the divisor is 0: add a small number to it, or clamp it."
_HINTS = {
    "log": _LOG, "log2": _LOG, "log10": _LOG, "div": _DIVIDE, "reciprocal": _DIVIDE,
    "softmax": _ROW, "log_softmax": _ROW, "scaled_dot_product_attention": _ROW,
    "multi_head_attention_forward": _ROW,
    "exp": "Its argument is too large: subtract the greatest first, or use logsumexp or softmax.",
    "normalize": "Give normalize a larger eps.",
}  # fmt: skip
_SLOPES = ("sqrt", "rsqrt", "norm", "vector_norm", "linalg_norm", "std", "var", "cdist", "pow")
_BEFORE = "Guard the steps before: an optimiser's step or a loaded checkpoint put it there."
_REMEDIES = {  # by the node of the backward, or by the kind of fault
    REENTRANT: "checkpoint(..., use_reentrant=False) shows what inside of it does.",
    ADDING: "Divide the loss by the number of backwards of a step, or call zero_grad() between.",
    "parameter": _BEFORE,
    "buffer": _BEFORE,
    "hook": "Look at the hooks that were put there with register_hook.",
    "memory": "Use zeros, or write to all of it first.",
    "unknown": "Every module is checked from now on: run it again with the same guard.",
}
_SCALED = "If a GradScaler scales the loss, give it: guard(model, scaler=scaler)."


@dataclass(eq=False)
class Fault:
    """Numbers that are not finite: where they were seen, and what made them.

    `kind` is one of: `operation`, `module`, `memory` (never written to), `parameter` or `buffer`
    (bad before), `input` (of the model), `loss`, `sum` (of finite gradients), `hook` (on a
    gradient), `outside` (a tensor from elsewhere), or `unknown`.
    """

    step: int  # the call of the model, from 0
    backward: bool
    seen: Labelled  # where the bad numbers were seen
    kind: str = "unknown"
    place: str = ""
    operation: str = ""
    node: str = ""
    source: str = ""
    values: Labelled = field(default_factory=lambda: cast(Labelled, []))
    given: Labelled = field(default_factory=lambda: cast(Labelled, []))
    others: list[str] = field(default_factory=lambda: cast("list[str]", []))
    remarks: list[str] = field(default_factory=lambda: cast("list[str]", []))
    owner: str = ""  # the class of the module
    path: str = ""  # and its name
    folder: Path | None = None
    dump: str = ""  # what is told of it

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that a dump contains."""
        texts = ("kind", "place", "operation", "node", "source", "owner", "path")
        numbers = {
            name: [[label, own.to_dict()] for label, own in cast(Labelled, getattr(self, name))]
            for name in ("seen", "values", "given")
        }
        told = {name: getattr(self, name) for name in texts}
        return {"step": self.step, "backward": self.backward, **told, **numbers}

    def __str__(self) -> str:
        rows = [(f"made {label}".strip(), str(own)) for label, own in self.values]
        rows += [(f"given {label}".strip(), str(own)) for label, own in self.given]
        rows += [("line", self.source)] if self.source else []
        rows += [("also", other) for other in self.others]
        rows += [("dump", self.dump)] if self.dump else []
        width = max((len(label) for label, _ in rows), default=0)
        table = [f"  {label:{width}}  {text}" for label, text in rows]
        return "\n".join([self.headline(), *table, *self.remarks])

    def headline(self) -> str:
        """Return a sentence that says what made the numbers."""
        owner = repr(self.path) if self.path else "the model itself"
        owner += f" ({self.owner})" if self.owner else ""
        op, place = self.operation, str(self.place)
        name = f"{op!r} ({self.node})" if op else self.node
        if self.kind == "operation" and self.backward:
            return f"The backward of {name} in {owner} made them from finite gradients:"
        if self.node == ADDING:
            return (
                f"What this backward gave {place!r} is finite. Added to what backwards before it "
                "have left there it is not:"
            )
        met = f"{name} in {owner}" if name else repr(place)
        clean = "finite inputs" if not any(own.bad for _, own in self.given) else "what is meant"
        return {
            "operation": f"{place!r}: {op!r} in {owner} made them from {clean}:",
            "memory": f"{place!r}: {op!r} in {owner} gave memory that was read before anything "
            "was written there:",
            "module": f"{place!r}: a call of {owner} made them from {clean}:",
            "parameter": f"The parameter {place!r} was bad before this step:",
            "buffer": f"The buffer {place!r} was bad before this step:",
            "input": f"They came in with the model's input {place!r}:",
            "outside": f"{place!r}: {op!r} in {owner} was given a tensor that was bad already, "
            "and that no operation of this run has made:",
            "loss": "They came from outside the model, from the loss: "
            + (
                "the gradient of the model's output was bad already:"
                if self.values
                else "all that flowed back through the model is finite."
            ),
            "sum": f"The sum of the gradients of several uses of {met} is not finite, while "
            "each of them is:",
            "hook": f"A hook on the gradient of {met} made them of a finite one:",
            "unknown": "What made them cannot be told.",
        }[self.kind]


def fault_of(
    origins: Sequence[Origin], often: set[tuple[str, str]], step: int, seen: Labelled
) -> Fault:
    """Return the fault of the first origin; it mentions the others."""
    origin = origins[0]
    fault = Fault(step, origin.backward, seen, origin.kind, _place(origin, often))
    fault.operation, fault.node, fault.source = origin.operation, origin.node, origin.source
    fault.values, fault.given, fault.path = origin.values, origin.given, origin.path
    told = dict.fromkeys(f"{_place(own, often)} ({own.kind})" for own in origins)
    fault.others = list(told)[1:5]  # forward and backward of an operation are one place
    return fault


def _place(origin: Origin, often: set[tuple[str, str]]) -> str:
    if origin.kind in ("parameter", "buffer"):
        return str(Place(origin.path))
    return str(origin.place((origin.path, origin.operation) in often))


def explain(fault: Fault, scaled: bool) -> NonFiniteError:
    """Return the error for a fault."""
    shown = [f"{label}: {own.counts()}" for label, own in fault.seen[:3]] or ["a gradient"]
    more = f" and {len(fault.seen) - 3} more" if len(fault.seen) > 3 else ""
    error = NonFiniteError(
        f"guard found numbers that are not finite in step {fault.step}, {'; '.join(shown)}{more}.",
        str(fault),
        _remedy(fault, scaled),
    )
    error.fault = fault
    return error


def _remedy(fault: Fault, scaled: bool) -> str:
    half = any(own.kind.endswith(" float16") for _, own in fault.values)
    if fault.kind == "input":
        where = f"what calls {fault.path!r}" if fault.path else "the data"
        return f"Look at {where}. If it is meant so: guard(model, ignore={fault.place!r})."
    if fault.kind == "loss":
        used = "output" if fault.values else "parameters"
        said = f"Look at the loss, and at what it does with the model's {used}."
        return f"{said} {_SCALED}" if half and not scaled else said
    for key in (fault.node, fault.kind):
        if key in _REMEDIES:
            return _REMEDIES[key]
    op = fault.operation.strip("_")
    hint = _ZERO if fault.backward and op in _SLOPES else _HINTS.get(op, "")
    if half and not any(own.nan for _, own in fault.values):
        hint = "float16 ends at 65504: compute this in float32 or bfloat16."
    if fault.backward and half and not scaled:
        hint += f" {_SCALED}"
    return f"{hint} If it is meant so: guard(model, ignore={fault.place or ''!r}).".strip()
