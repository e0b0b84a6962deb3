"""What strikes the eye in the values on a page: findings from their statistics.

- `remark(outline)`: the findings, the gravest first
"""

from __future__ import annotations

from typing import Any

from hookline.pages.outlines import Entry, Outline

__all__ = ["remark"]

_MOST = 60
_DEAD = 0.5  # the share of channels from which on it is worth a word


def remark(outline: Outline) -> list[dict[str, Any]]:
    """Values that are not finite, all 0, or 0 in most channels; the gravest first.

    Of whole numbers and truth values, a 0 says nothing.
    """
    found = [finding for entry in outline.entries for finding in _of(entry)]
    return sorted(found, key=lambda finding: finding["severity"] != "error")[:_MOST]


def _of(entry: Entry) -> list[dict[str, Any]]:
    statistics = entry.summary or {}
    count, broken = statistics.get("count", 0), statistics.get("nonfinite", 0)
    what = "gradient" if entry.gradient else "value"
    if broken:
        text = f"{broken:,} of {count:,} numbers of the {what} are NaN or infinite."
        evidence = {"nonfinite": broken, "share": broken / count}
        advice = "Look at the first place in model order that has any."
        return [_finding(entry, "not finite", text, evidence, advice, "error")]
    if entry.dtype.startswith(("int", "uint", "bool")):  # masks, indices and counts may well be 0
        return []
    if count > 1 and statistics.get("zeros") == 1.0:
        if entry.weight and ("bias" in entry.group or entry.group == "running_mean"):
            return []  # they begin as 0
        advice = "No signal passes here." if not entry.gradient else "Nothing is learned from here."
        text = f"All {count:,} numbers of the {what} are 0."
        return [_finding(entry, "all zero", text, {"zeros": 1.0}, advice)]
    dead = statistics.get("dead")
    if dead is not None and dead >= _DEAD and not entry.gradient:
        text = f"{dead:.0%} of the channels are 0 for every sample and position."
        advice = "Dead units: a smaller learning rate, another start, or a leaky activation."
        return [_finding(entry, "dead channels", text, {"dead": dead}, advice)]
    return []


def _finding(
    entry: Entry, kind: str, message: str, evidence: dict[str, float], advice: str,
    severity: str = "warning",
) -> dict[str, Any]:  # fmt: skip
    told = {"message": message, "evidence": evidence, "advice": advice, "severity": severity}
    return {"kind": kind, "place": entry.place, "step": None, **told}
