"""Entering and leaving: what all verbs that change or watch a model have in common.

- `Entering`: acts inside `with`, or from `.attach()` to `.remove()`; never before
- `enter(context, attached)`, `leave(context)`, `is_open(context)`: for contexts made of others
- `never_forgotten(context)`: do not warn if the context is never entered
"""

from __future__ import annotations

import sys
import types
from typing import Any, NoReturn, Self

from torch import Tensor, nn

from hookline.engine import compiling
from hookline.errors import UsageError, warn_outside
from hookline.torch_checks import require
from hookline.torch_private import compiler_is_loaded, compiler_is_used, is_compiler_error

__all__ = ["Entering", "enter", "is_open", "leave", "never_forgotten"]


class Entering:
    """Acts inside `with`, or from `.attach()` to `.remove()`; entering again starts afresh."""

    _verb = ""
    # What `with ... as` gives, if it can be read: a name for it, and the attribute that holds it.
    _gives = _kept_as = ""
    _wheres: tuple[Any, ...] = ()
    _needs: tuple[str, ...] = ("core",)  # the probes for an untested torch: see torch_probes.py
    _open = False
    _attached = False
    _unseen = False  # whether the compiler was not there when this was entered
    _entered = True  # until the constructor is through: one that fails is not a forgotten one
    _told = False  # whether an error has said that it was never entered

    def __init__(self, model: nn.Module | Tensor) -> None:
        if not isinstance(model, (nn.Module, Tensor)):
            raise TypeError(
                f"{self._verb} was asked to work on a {type(model).__name__}. A model is a "
                f"torch.nn.Module. Give it first, then the places."
            )
        self._model: Any = model
        self._entered = False

    def _start(self, attached: bool) -> None:
        """Begin to act; if it raises half-way, `_stop` is called."""
        raise AssertionError("a verb starts")

    def _stop(self) -> None:
        """Undo all that was done so far; safe to call again after it was interrupted."""
        raise AssertionError("a verb stops")

    def _after_block(self) -> None:
        """Called after the block, if it was removed inside: undo what could not be undone there."""

    def _verify(self) -> None:
        """Called after the block if nothing was raised in it."""

    def _runs_compiled(self) -> bool:
        """Return True if it works inside of compiled graphs."""
        return False

    def _result(self) -> Any:
        return self

    def _enter(self, attached: bool) -> None:
        if self._open or not hasattr(self, "_model"):
            state = "is open already" if self._open else "is the handle of a copied model"
            raise RuntimeError(
                f"{self!r} was entered. It {state}. Leave it first, or make another."
            )
        self._entered = True
        require(*self._needs)
        # Open from the first step on: whatever interrupts it, leaving undoes what was done.
        self._open = True
        self._attached = attached
        try:
            self._start(attached)
            if not self._open:  # a function that was called meanwhile has removed it
                self._stop()
                return
            self._unseen = not compiler_is_loaded()
            if not self._unseen:
                compiling.suspend(self, self._runs_compiled())
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        if self._open:
            self._stop()
            if not self._unseen:
                compiling.resume(self)
            self._open = self._attached = False
            if self._unseen and compiler_is_loaded() and compiler_is_used():
                warn_outside(
                    f"{self!r} was open when torch.compile was first used: calls of compiled "
                    f"models may be missing. Compile before, so that they run eagerly meanwhile."
                )

    def __enter__(self) -> Self:
        self._enter(attached=False)
        return self._result()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> bool | None:
        opened = self._open
        if opened:
            self._leave()
        else:
            self._after_block()
        if error is not None:
            return self._failed(error, trace)
        if opened:
            self._verify()
        return None

    def _failed(self, error: BaseException, trace: types.TracebackType | None) -> bool | None:
        """Called after the block if it raised an error; return True to swallow the error."""
        if is_compiler_error(error):
            error.add_note(
                "hookline: the model was compiled inside the `with`. Compile it before, and it "
                "runs eagerly in here; or leave out fullgraph=True."
            )
        return None

    def attach(self) -> Self:
        """Act from now on, until `remove()`. The model keeps this alive."""
        self._enter(attached=True)
        return self

    def remove(self) -> None:
        """Stop acting and leave nothing behind. Never raises, and may be called twice."""
        self._leave()

    # -- read as if it were what it gives --------------------------------------------------------

    def _misused(self, how: str) -> tuple[str, str, str]:
        """Return the three parts of an error: this was read as if it were a record."""
        ended = "It has ended." if self._entered else "It was never entered."
        state = "It is attached." if self._attached else "It is open." if self._open else ended
        name, remedy = self._gives, "Use it in a `with` statement, around the calls of the model."
        if not name:
            state += " It has nothing to read."
        elif self._attached and self._kept_as:
            remedy = f"Read its .{self._kept_as}."
        else:
            call = f"with hookline.{self._verb}(...) as {name}"
            remedy = f"Use it in a `with` statement and read what that gives: `{call}`."
        self._told = True
        return f"{how} {self!r} was asked for.", state, remedy

    def __getitem__(self, key: Any) -> NoReturn:
        raise UsageError(*self._misused(f"[{key!r:.60}] of"))

    def __contains__(self, key: Any) -> NoReturn:
        raise UsageError(*self._misused(f"Whether {key!r:.60} is in"))

    def __iter__(self) -> NoReturn:
        raise UsageError(*self._misused("Iteration over"))

    def __len__(self) -> NoReturn:
        raise UsageError(*self._misused("The length of"))

    def __bool__(self) -> bool:
        return True

    def __del__(self) -> None:
        if self._open:
            self._leave()
        elif not (self._entered or self._told or sys.is_finalizing()):
            warn_outside(
                f"{self!r} was never entered, so it did nothing. Use it in a `with` statement, or "
                f"call .attach() and later .remove()."
            )

    def __reduce__(self) -> Any:
        return _closed, (type(self),)

    def __repr__(self) -> str:
        asked = ", ".join(
            type(where).__name__ if isinstance(where, nn.Module) else repr(where)
            for where in self._wheres
        )
        state = "attached" if self._attached else "open" if self._open else "closed"
        return f"<hookline {self._verb}{asked and ' at '}{asked}, {state}>"


def enter(context: Entering, attached: bool) -> None:
    """Enter a context that is a part of another one; it gives its result to nobody."""
    context._enter(attached)


def leave(context: Entering) -> None:
    """Leave a context that is a part of another one, without the check at the end."""
    context._leave()


def is_open(context: Entering) -> bool:
    """Return True if a context acts now."""
    return context._open


def never_forgotten(context: Entering) -> None:
    """Do not warn if a context is dropped that was not entered."""
    context._entered = True


def _closed(kind: type[Entering]) -> Entering:
    """Return the handle of a copied or loaded model, which does nothing."""
    return kind.__new__(kind)
