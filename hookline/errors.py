"""The exceptions of hookline.

    HooklineError
    ├── PlaceError (ValueError)            a place is malformed, or has two readings
    ├── PlaceNotFound (LookupError)        a place matches nothing in the model
    ├── NotHookable (TypeError)            nothing can be observed at that place, ever
    ├── NeverFired (RuntimeError)          a place was asked for, and nothing happened there
    ├── NotCaptured (LookupError)          a record was asked for what it does not hold
    ├── SeveralCalls (LookupError)         one value was asked for, and there are several
    ├── SeveralTensors (TypeError)         one tensor was asked for, and there are several
    ├── ValueChanged (RuntimeError)        an attached value was changed in place since
    ├── GradientNotAvailable (RuntimeError) no gradient can be given for that place
    ├── ChangeError (ValueError)           a change does not fit the value it meets
    ├── RecordError (ValueError)           a record cannot be saved, or its file is not one
    ├── StoreError (ValueError)            a store cannot be written or read as asked
    ├── HarvestError (ValueError)          a harvest cannot begin, or not go on as asked
    ├── RecipeError (ValueError)           a recipe does not fit, or cannot be saved or read
    ├── StatisticsError (ValueError)       a statistic cannot take a value, a mask or a file
    ├── BatchError (ValueError)            a batch, or what is made of a run, does not fit
    ├── MissingExtra (ImportError)         an optional library is not installed
    ├── RunError (ValueError)              a run directory cannot be written or read as asked
    ├── NonFiniteError (ArithmeticError)   guard found a NaN or an infinity
    ├── ReplayError (ValueError)           what a guard has written cannot be run again
    ├── ReportError (ValueError)           a page cannot be made or served as asked
    ├── FigureError (ValueError)           a figure cannot be drawn of what was given
    ├── UnsupportedTorch (RuntimeError)    this torch lacks something that a feature is built on
    └── UsageError (TypeError)             an option has no such value, or a context is read

    HooklineWarning (UserWarning)

Every message has three parts: what was asked, what was found, what to do.

- `warn_outside(message)`: a HooklineWarning at the user's line
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hookline.captures.record import Record

__all__ = [
    "BatchError",
    "ChangeError",
    "FigureError",
    "GradientNotAvailable",
    "HarvestError",
    "HooklineError",
    "HooklineWarning",
    "MissingExtra",
    "NeverFired",
    "NonFiniteError",
    "NotCaptured",
    "NotHookable",
    "PlaceError",
    "PlaceNotFound",
    "RecipeError",
    "RecordError",
    "ReplayError",
    "ReportError",
    "RunError",
    "SeveralCalls",
    "SeveralTensors",
    "StatisticsError",
    "StoreError",
    "UnsupportedTorch",
    "UsageError",
    "ValueChanged",
    "warn_outside",
]

_INSIDE = (
    str(Path(__file__).parent / "_")[:-1], str(Path(torch.__file__).parent / "_")[:-1],
    "<eval_with_key>", "<frozen",
)  # fmt: skip
_STANDARD = str(Path(contextlib.__file__).parent / "_")[:-1]


class HooklineError(Exception):
    """The base of every error that hookline raises on purpose.

    >>> str(HooklineError("No module matches 'fcc'.", "Closest: 'fc'.", "List them with select()."))
    "No module matches 'fcc'. Closest: 'fc'. List them with select()."
    """

    def __init__(self, asked: str, found: str = "", remedy: str = "") -> None:
        super().__init__(asked, found, remedy)
        self.asked = asked
        self.found = found
        self.remedy = remedy

    def __str__(self) -> str:
        return " ".join(part for part in (self.asked, self.found, self.remedy) if part)


class PlaceError(HooklineError, ValueError):
    """A place is malformed, names no port, or has two readings."""


class PlaceNotFound(HooklineError, LookupError):
    """A place matches no module, parameter or buffer of the model."""


class NotHookable(HooklineError, TypeError):
    """The place exists, but no hook can ever observe it."""


class NeverFired(HooklineError, RuntimeError):
    """A place was asked for, and nothing happened there, or not at each call that was asked for.

    `record` is what was captured at the other places, if this came from a capture.
    """

    record: Record | None = None

    def __reduce__(self) -> tuple[type[NeverFired], tuple[str, ...]]:
        return type(self), (self.asked, self.found, self.remedy)  # a record stays in its process


class NotCaptured(HooklineError, LookupError):
    """A record was asked for a place or a call that it does not hold."""


class SeveralCalls(HooklineError, LookupError):
    """One value was asked for, and the module was called several times."""


class SeveralTensors(HooklineError, TypeError):
    """One tensor was asked for, and the value holds several, or none."""


class ValueChanged(HooklineError, RuntimeError):
    """An attached value was changed in place after it was captured."""


class GradientNotAvailable(HooklineError, RuntimeError):
    """No gradient arrived at that place, or none can be told apart there."""


class ChangeError(HooklineError, ValueError):
    """A change does not fit the value that it meets."""


class RecordError(HooklineError, ValueError):
    """A record cannot be saved, or its file is not one."""


class StoreError(HooklineError, ValueError):
    """A store cannot be written or read as asked, or its files are not sound."""


class HarvestError(HooklineError, ValueError):
    """A harvest cannot begin, or cannot go on where an earlier one stopped."""


class RecipeError(HooklineError, ValueError):
    """A recipe does not fit a model, cannot be saved, or its file is not one."""


class StatisticsError(HooklineError, ValueError):
    """A statistic cannot take a value or a mask, be merged with another, or be read."""


class BatchError(HooklineError, ValueError):
    """A batch does not fit the model, or nothing can be made of what a run gave."""


class MissingExtra(HooklineError, ImportError):
    """An optional library is not installed; the message has the line that installs it."""


class RunError(HooklineError, ValueError):
    """A run directory cannot be written or read as asked, or its files are not sound."""


class NonFiniteError(HooklineError, ArithmeticError):
    """A guard found a NaN or an infinity; `fault` says where, and what made it."""

    fault: Any = None  # a hookline.guards.faults.Fault

    def __str__(self) -> str:
        return "\n".join(part for part in (self.asked, self.found, self.remedy) if part)


class ReplayError(HooklineError, ValueError):
    """What a guard has written cannot be read, or cannot be run again as asked."""


class ReportError(HooklineError, ValueError):
    """A page cannot be made of that, or a folder cannot be served."""


class FigureError(HooklineError, ValueError):
    """A figure cannot be drawn of what was given."""


class UnsupportedTorch(HooklineError, RuntimeError):
    """The installed torch lacks a private part that the feature is built on."""


class UsageError(HooklineError, TypeError, ValueError):
    """An option has no such value (so it is a ValueError, too), or a context was read as if it
    were what it gives.
    """


class HooklineWarning(UserWarning):
    """Something that was surely not meant, but harms nothing."""


def warn_outside(message: str) -> None:
    """Warn at the line of the user that led here, such as a call of the model.

    It is the innermost line outside of hookline, torch and installed libraries; where there is
    none, the innermost one outside of hookline and torch.
    """
    frame: FrameType | None = sys._getframe()
    level, outside = 0, 0
    while frame is not None:
        level, file = level + 1, frame.f_code.co_filename
        if not file.startswith(_INSIDE):
            outside = outside or level
            if not _installed(file):
                outside = level
                break
        frame = frame.f_back
    warnings.warn(message, HooklineWarning, stacklevel=outside or level)


def _installed(file: str) -> bool:
    """Return True if a file belongs to Python or to an installed library."""
    parts = Path(file).parts
    return file.startswith(_STANDARD) or "site-packages" in parts or "dist-packages" in parts
