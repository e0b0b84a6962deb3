"""The check of a torch that hookline was not tested with, when a feature first needs it.

- `require(*groups)`: raise `UnsupportedTorch` if a probe of these groups fails
- `passes(group)`: the same question, answered by True or False

On a tested torch neither does anything; `hookline doctor` runs the probes on any torch.
`torch_probes.py` has the groups and their probes. A group that has passed is not tried again in the
same process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

import torch

from hookline.errors import UnsupportedTorch
from hookline.supported_versions import NEWEST_TORCH, OLDEST_TORCH, is_tested_torch

if TYPE_CHECKING:
    from hookline.torch_probes import Outcome

__all__ = ["passes", "require"]

_tested = is_tested_torch()
_passed: set[str] = set()


def require(*groups: str) -> None:
    """Raise `UnsupportedTorch` if this torch is untested and a probe of these groups fails."""
    if not _tested:
        _check(groups)


def passes(group: str) -> bool:
    """Return False if this torch is untested and a probe of this group fails."""
    try:
        require(group)
    except UnsupportedTorch:
        return False
    return True


def _check(groups: Iterable[str]) -> None:
    if torch.compiler.is_compiling():  # a graph must not contain probes; the next entering checks
        return
    for group in groups:
        if group not in _passed:
            from hookline.torch_probes import run

            for outcome in run(group):
                if outcome.state == "differs":
                    _refuse(outcome)
            _passed.add(group)


def _refuse(outcome: Outcome) -> NoReturn:
    from hookline.torch_probes import GROUPS

    oldest, newest = (".".join(map(str, version)) for version in (OLDEST_TORCH, NEWEST_TORCH))
    name, group = outcome.probe.name, outcome.probe.group
    raise UnsupportedTorch(
        f"hookline asked torch for {name}, which is needed for: {GROUPS[group]}.",
        f"torch {torch.__version__} was not tested with hookline, and differs: "
        f"{outcome.reason.rstrip('.')}.",
        f"Install torch {oldest} to {newest}. `hookline doctor` lists everything that differs.",
    )
