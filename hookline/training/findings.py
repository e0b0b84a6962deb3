"""Findings: what is wrong with a training, in words and numbers.

- `Finding`: one problem: what, where, at which step, and the evidence
- `Findings`: a list of findings, shown as a table in notebooks
- `overflowed(step, count, scale)`: the finding that a scaler skips every step
- `to_json`, `from_json`: numbers, also those that are not finite
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any, Literal, cast

from hookline.values.tables import as_html

__all__ = ["Finding", "Findings", "Severity", "from_json", "overflowed", "to_json"]

Severity = Literal["warning", "error"]
_WIDTH = 100  # of a printed line


@dataclass(frozen=True)
class Finding:
    """One problem that was found in a training run.

    >>> finding = Finding(
    ...     "dead units", "2", 150, "31 of 64 units of '2' (ReLU) gave only zeros.",
    ...     {"dead": 0.484}, "Lower the learning rate.",
    ... )  # fmt: skip
    >>> print(finding)
    step 150: dead units at '2': 31 of 64 units of '2' (ReLU) gave only zeros. Lower the learning
    rate.
    >>> Finding.from_dict(finding.to_dict()) == finding
    True

    `kind` is its name, `place` and `step` where and when it was found; `message` is one sentence
    with the numbers, `evidence` has the numbers themselves, `advice` says what to try. `severity`
    is `"error"` if the training cannot recover, such as from values that are not finite, else
    `"warning"`.
    """

    kind: str
    place: str
    step: int
    message: str
    evidence: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    advice: str = ""
    severity: Severity = "warning"

    def __str__(self) -> str:
        where = f" at {self.place!r}" if self.place else ""
        text = f"step {self.step}: {self.kind}{where}: {self.message} {self.advice}"
        return text.rstrip()

    def cells(self) -> tuple[str, str, str]:
        """Return the place, the step and the message, for tables."""
        what = f"error: {self.kind}" if self.severity == "error" else self.kind
        return self.place or "''", f"{self.step:,}", what

    def _repr_html_(self) -> str:
        return Findings([self])._repr_html_()

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, ready for JSON: numbers that are not finite become text."""
        found = {name: getattr(self, name) for name in _TEXTS}
        evidence = {name: to_json(float(value)) for name, value in self.evidence.items()}
        return found | {"step": self.step, "evidence": evidence}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Finding:
        """Read the result of `to_dict`; raise a `ValueError` that says what does not fit."""
        for name in _TEXTS:
            if type(content.get(name)) is not str:
                raise ValueError(f"{name!r} is no text")
        step, evidence = content.get("step"), content.get("evidence")
        if type(step) is not int or not -(2**63) <= step < 2**63:
            raise ValueError("'step' is no whole number")
        if type(evidence) is not dict or content["severity"] not in ("warning", "error"):
            raise ValueError("'evidence' or 'severity' is not what it should be")
        named = cast("dict[str, Any]", evidence)
        numbers = {str(name): from_json(value) for name, value in named.items()}
        texts: dict[str, Any] = {name: content[name] for name in _TEXTS}
        return cls(step=step, evidence=numbers, **texts)


class Findings(list[Finding]):
    """A list of findings in their order, printed in columns, and as a table in notebooks.

    >>> found = Findings([Finding("dead units", "2", 150, "31 of 64 units gave only zeros.")])
    >>> found
    [Finding(kind='dead units', place='2', step=150, ...)]
    >>> print(found)
    step 150  2  dead units
        31 of 64 units gave only zeros.
    """

    def __str__(self) -> str:
        if not self:
            return super().__str__()
        width = [max(len(one.cells()[n]) for one in self) for n in range(2)]
        lines: list[str] = []
        for one in self:
            place, step, what = one.cells()
            lines.append(f"step {step:>{width[1]}}  {place:<{width[0]}}  {what}")
            for text in (one.message, one.advice):
                lines += [f"    {line}" for line in wrap(text, _WIDTH - 4)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        errors = sum(one.severity == "error" for one in self)
        title = f"{len(self) or 'No'} finding{'s' * (len(self) != 1)}"
        title += f", {errors} of them error{'s' * (errors != 1)}" if errors else ""
        head = ("place", "step", "found", "", "what to try")
        return as_html(title, [head, *((*one.cells(), one.message, one.advice) for one in self)])


def overflowed(step: int, count: int, scale: float) -> Finding:
    """Return the finding that a scaler has skipped that many steps in a row."""
    message = f"The last {count} backwards had gradients that are not finite, at scale {scale:g}."
    advice = "It is not the scale: find the operation with hookline.guard(model)."
    evidence = {"backwards": float(count), "scale": scale}
    return Finding("non-finite values", "", step, message, evidence, advice, "error")


_TEXTS = ("kind", "place", "message", "advice", "severity")


def to_json(value: float) -> float | str:
    """Return a number for JSON: those that are not finite become text."""
    return value if math.isfinite(value) else str(value)


def from_json(value: Any) -> float:
    """Return the number that `to_json` wrote; raise a `ValueError` if it is none."""
    if type(value) in (int, float):
        try:
            return float(value)
        except OverflowError:
            raise ValueError("a number is too large") from None
    if value in ("nan", "inf", "-inf"):
        return float(value)
    raise ValueError(f"{value!r:.40} is no number")
