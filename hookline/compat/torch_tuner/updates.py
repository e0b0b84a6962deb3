"""The change that an update makes to a value.

- `Update(owner, values, noise)`: new values, noise to multiply by, or both
- `Noise`: the type of noise
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from hookline.compat.torch_tuner.handles import HookKind
from hookline.edits.changes import Change, replace
from hookline.edits.ready_changes import scale
from hookline.engine.calls import Call
from hookline.errors import ChangeError
from hookline.values.nested import Path, leaves, set_part, show_path

__all__ = ["Noise", "Update"]

Noise: TypeAlias = Tensor | float | None


class _Owner(Protocol):
    """The object whose update it is."""

    paused: bool  # during a run of its own, which changes nothing


@dataclass(frozen=True, eq=False)
class Update(Change):
    """New values, or noise to multiply by, or both."""

    owner: _Owner
    values: Any
    noise: Noise

    def at(self, kind: HookKind) -> Change | Callable[[Any, Call], Any]:
        """Return the change to make where an update of this kind acts."""
        # Gradients come one tensor at a time. If there are several, new values for one of them
        # would reach all: a ready change refuses that.
        alone = kind.port.startswith(":grad") and self.values is not None
        return self if alone else self.change

    def apply(self, value: Tensor, call: Call) -> Tensor:
        return self._changed(value, self.values, call)

    def change(self, value: Any, call: Call) -> Any:
        """Return the value with all its tensors changed."""
        if self.owner.paused:
            return value
        old = dict(leaves(value))
        new: dict[Path, Any] = dict.fromkeys(old, self.values)
        if self.values is not None and (len(old) > 1 or not isinstance(self.values, Tensor)):
            new = dict(leaves(self.values))
        if not old or new.keys() != old.keys():
            given = "" if self.values is None else f", the new values {_parts(new)}"
            raise ChangeError(
                f"An update of {str(call.place)!r} was asked for.",
                f"It holds {_parts(old)}{given}.",
                "Give new values of the same structure, or another layer.",
            )
        for path, tensor in old.items():
            whole = not (tensor.is_floating_point() or tensor.is_complex())
            if whole and len(old) > 1 and self.values is None:
                continue  # noise is not meant for the indices beside a value
            value = set_part(value, path, self._changed(tensor, new[path], call))
        return value

    def _changed(self, value: Tensor, values: Any, call: Call) -> Tensor:
        if values is not None:
            value = replace(values).apply_checked(value, call)
        if self.noise is not None:
            value = scale(self.noise).apply_checked(value, call)
        return value


def _parts(paths: Iterable[Path]) -> str:
    return ", ".join(show_path(path) or "one tensor" for path in paths) or "no tensors"
