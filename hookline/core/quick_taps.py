"""The quick way: taps of which each is its own site, for captures of one whole value a module.

- `Common`: what the taps of a capture at one port have in common
- `OutputTap`: a module's output
- `LastTap`: the same of the last call only, also in compiled graphs
- `GradOutputTap`, `GradInputTap`: the gradient at a module's output, or first input
- `QUICK`: the tap for each port; `tap_all` puts them on modules

They do what `Site` and `CaptureTap` do in the commonest cases, with no object made for a call,
and hand every other call over to these.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from hookline.core import gradients, input_gradients
from hookline.core.grammar import escape
from hookline.core.keeping import WHOLE, CaptureTap, Kept, Options
from hookline.core.recomputation import Regions, in_backward, may_recompute
from hookline.core.sites import ACTIVE, KEYS, Site
from hookline.core.snapshots import LAZY, snapshot
from hookline.core.taps import Frame, is_over, now
from hookline.core.targets import Target

__all__ = [
    "CLOSED", "QUICK", "Common", "GradInputTap", "GradOutputTap", "LastTap", "OutputTap",
    "QuickTap", "tap_all",
]  # fmt: skip


CLOSED = 0  # the owner of taps that have ended: no context has this serial
Given = list[tuple[Tensor, Any, int, int]]  # as `note_given` has them


class Common:
    """What the taps at one port have in common, kept once so that making them is cheap."""

    __slots__ = ("context", "detach", "in_graph", "key", "lazy", "options", "owner")

    def __init__(self, context: weakref.ref[Any], options: Options, owner: int | None) -> None:
        self.context = context
        self.options = options
        self.owner = owner
        self.detach = options.detach
        self.lazy = LAZY
        self.in_graph = False  # whether compiled graphs may keep values by themselves
        self.key = next(KEYS)


class QuickTap(CaptureTap, Site):
    """A tap that is its own site."""

    common: Common = cast(Common, None)  # in a copied module
    beside = 1  # the quick taps of its context at its module
    port = "output"

    def __init__(self, path: str, module: nn.Module, common: Common) -> None:
        self.path = path
        self.module = module
        self.ident = id(module)
        self.common = common
        self.context = common.context
        self.options = common.options
        self.owner = common.owner
        self.kept = []

    @property
    def target(self) -> Target:
        return Target(cast(nn.Module, self.module), self.path, self.port, ident=self.ident)

    def stranger(self, module: nn.Module) -> None:
        if getattr(self.common, "owner", None) != CLOSED:  # a copy has no such thing
            super().stranger(module)

    def release(self) -> None:
        self.module = None

    @property
    def spelled(self) -> str:
        path = escape(self.path)
        return path if self.port == "output" else f"{path}:{self.port}"


class OutputTap(QuickTap):
    """The commonest tap: the whole output of a module, kept as it is."""

    def unregister(self, module: nn.Module) -> None:
        module._forward_hooks.pop(self.key, None)

    def after_call(
        self,
        module: nn.Module,
        args: Any,
        output: Any,
        # Found more quickly here than as names of this file.
        active: Callable[[], frozenset[int | None]] = ACTIVE.get,
        in_backward: Callable[[], int] = in_backward,
        plain: type[Tensor] = Tensor,
        /,
    ) -> None:
        """The forward hook."""
        common = self.common
        if module is not self.module or common.owner not in active():
            return self.stranger(module)
        if in_backward() == -1:
            self.outside = True
        elif self.outside:
            return None  # recomputed
        if type(output) is not plain:
            self.kept.append(common.options.keeps(output))
            return None
        try:
            if output.requires_grad:
                if not common.detach:
                    self.kept.append((output, output._version))
                    return None
                output = output.detach()
            if (  # the commonest snapshot, without a call: see snapshots.py
                common.lazy
                and output.is_cpu
                and not output.is_quantized
                and output.untyped_storage().resizable()
                and output._use_count() == 1  # pyright: ignore - not in torch's stubs
            ):
                self.kept.append((output._lazy_clone(), None))
                return None
        except RuntimeError:  # no version (inference mode) or no storage (sparse, nested, vmap)
            pass
        self.kept.append((snapshot(output), None))
        return None


class LastTap(OutputTap):
    """The same for the last call only, in a way that torch.compile takes into its graphs."""

    slot: Tensor | None = None  # the value of the last compiled call, if no other came since
    _kept: list[Kept] = []  # noqa: RUF012 - in a copied module, and never added to

    @property
    def kept(self) -> list[Kept]:
        return self._kept if self.slot is None else [(self.slot, None)]

    @kept.setter
    def kept(self, kept: list[Kept]) -> None:
        self._kept, self.slot = kept, None

    def after_call(self, module: nn.Module, args: Any, output: Any, /, *_: Any) -> None:
        # In a graph no version can be read and no copy-on-write made, but a copy costs little.
        if torch.compiler.is_compiling() and self.common.in_graph and type(output) is Tensor:
            self.slot = output.detach().clone() if self.common.detach else output.clone()
            return
        self.slot = None
        super().after_call(module, args, output)
        del self._kept[:-1]


class _GradientTap(QuickTap):
    """What both kinds of gradients have in common: what is known of a call before it begins."""

    paired = True
    # Hooks what the gradient will come by; false if there is more to look at.
    quickly: Callable[..., bool]

    def __init__(self, path: str, module: nn.Module, common: Common) -> None:
        super().__init__(path, module, common)
        self.ref = weakref.ref(self)
        # By the Python frame that calls both hooks of a call: what was known when it began.
        self.begun: dict[types.FrameType, tuple[int, Given]] = {}
        self.shapes = {}
        self.grads = {}

    def unregister(self, module: nn.Module) -> None:
        key = self.key
        module._forward_hooks.pop(key, None)
        module._forward_pre_hooks.pop(key, None)
        module._forward_pre_hooks_with_kwargs.pop(key, None)
        if self.module is not None and (self.begun or self.regions):
            self.begun = {}
            self.grad_inputs = self.grad_outputs = ()
            self.drain()

    def before_call(self, module: Any, args: Any, kwargs: Any = None) -> Any:
        """The pre-forward hook."""
        common = self.common
        if kwargs is None or module is not self.module or common.owner not in ACTIVE.get():
            return None  # the forward hook counts it
        caller = sys._getframe(1)
        if self.begun:
            for frame in [frame for frame in self.begun if is_over(frame)]:  # that call raised
                del self.begun[frame]
        given = None
        # Other contexts may change this call; a checkpoint may run it again.
        if len(module._forward_hooks) == self.beside and not may_recompute():
            given = self.noted(args, kwargs)
        if given is None:
            if self.regions is None:
                self.regions = Regions()
                self.add(self)
            return self.begin(module, args, kwargs, caller)
        self.outside = True
        self.begun[caller] = gradients.sequence(), given
        return None

    def after_call(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The forward hook."""
        common = self.common
        if module is not self.module or common.owner not in ACTIVE.get():
            return self.stranger(module)
        caller = sys._getframe(1)
        begun = self.begun.pop(caller, None)
        if begun is None:
            return self.end(output, caller)
        index = self.count
        self.count = index + 1
        self.shapes[index] = WHOLE
        if type(output) is not Tensor or not self.quickly(output, index, *begun):
            frame = Frame(index, False, caller)
            now.frame = 0
            frame.sequence, frame.given = begun
            self.thoroughly(output, index, frame)
        return None

    def noted(self, args: Any, kwargs: Any) -> Given | None:
        """What a call is given; None if it is not for the quick way."""
        return gradients.note_given(args, kwargs)

    def thoroughly(self, output: Any, index: int, frame: Frame) -> None:
        """Hook it in the general way."""
        raise AssertionError("a tap watches")

    def gradient(self, grad: Tensor, index: int, path: Any) -> Tensor | None:
        key = (index, in_backward())
        if key not in self.grads and LAZY and type(grad) is Tensor and grad.is_cpu:
            try:
                if not grad.requires_grad and grad.untyped_storage().resizable():
                    self.grads[key] = {path: (grad._lazy_clone(), None)}
                    self.fired += 1
                    return None
            except RuntimeError:  # no storage
                pass
        return super().gradient(grad, index, path)


class GradOutputTap(_GradientTap):
    """The gradient at the whole output of a module."""

    port = "grad_output"
    quickly = gradients.watch_fresh

    def thoroughly(self, output: Any, index: int, frame: Frame) -> None:
        gradients.watch_outputs(self, output, output, index, frame)


class GradInputTap(_GradientTap):
    """The gradient at the first input of a module."""

    port = "grad_input"

    def noted(self, args: Any, kwargs: Any) -> Given | None:
        if len(args) != 1 or kwargs or type(args[0]) is not Tensor or args[0].grad_fn is None:
            return None
        return gradients.note_given(args, kwargs)

    quickly = input_gradients.watch_lone_input

    def thoroughly(self, output: Any, index: int, frame: Frame) -> None:
        tensor, node, output_nr, _ = frame.given[0]
        frame.edges = ((self, tensor, [(tensor, [()])], {(node, output_nr): ()}),)
        input_gradients.watch_inputs(self, output, index, frame)


def tap_all(
    kind: type[QuickTap], modules: Iterable[tuple[str, Any]], common: Common, taps: list[QuickTap]
) -> None:
    """Tap modules, and add their taps; those that have one of this port are left as they are."""
    for path, module in modules:
        hooks, key = module._forward_hooks, common.key
        if key in hooks:  # by this module, or one that shares its hooks, such as a shallow copy
            others = (tap.port == kind.port and tap.module is module for tap in taps)
            if hooks[key].__self__.module is module or any(others):
                continue
            key = next(KEYS)
        tap: Any = kind(path, module, common)
        tap.key = key
        taps.append(tap)  # first, so that an interrupt leaves no hook behind
        if kind.paired:
            module._forward_pre_hooks_with_kwargs[key] = True
            module._forward_pre_hooks[key] = tap.before_call
        hooks[key] = tap.after_call


QUICK = {kind.port: kind for kind in (OutputTap, GradOutputTap, GradInputTap)}
