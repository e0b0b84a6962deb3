"""Find problems in the values on a page, from their statistics.

- `find_value_problems(tree)`: the findings, the most severe first
"""

from __future__ import annotations

from typing import Any

from hookline.view.page_tree import PageEntry, PageTree

__all__ = ["find_value_problems"]

_MOST = 60
_DEAD = 0.5  # the share of channels from which on it is worth a word


def find_value_problems(tree: PageTree) -> list[dict[str, Any]]:
    """Find values that are not finite, all 0, or 0 in most channels; the most severe first.

    Values are in the order of the model, then gradients in that of the backward, so that the first
    broken value is named first. A note says how many are left out. For integers and booleans, a 0
    is no problem.
    """
    values = [entry for entry in tree.entries if not entry.gradient]
    gradients = [entry for entry in tree.entries if entry.gradient]
    found = [finding for entry in [*values, *gradients[::-1]] for finding in _of(entry)]
    if len(found) > _MOST:
        tree.notes.append(f"{_MOST} of {len(found):,} findings are shown.")
    return sorted(found, key=lambda finding: finding["severity"] != "error")[:_MOST]


def _of(entry: PageEntry) -> list[dict[str, Any]]:
    statistics = entry.summary or {}
    count, broken = statistics.get("count", 0), statistics.get("nonfinite", 0)
    what = "gradient" if entry.gradient else "value"
    if broken:
        text = f"{broken:,} of {count:,} numbers of the {what} are NaN or infinite."
        evidence = {"nonfinite": broken, "share": broken / count}
        order = "last" if entry.gradient else "first"
        advice = f"Look at the {order} place in model order that has any."
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
    entry: PageEntry, kind: str, message: str, evidence: dict[str, float], advice: str,
    severity: str = "warning",
) -> dict[str, Any]:  # fmt: skip
    told = {"message": message, "evidence": evidence, "advice": advice, "severity": severity}
    return {"kind": kind, "place": entry.place, "step": None, **told}
