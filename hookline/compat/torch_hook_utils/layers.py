"""Layers made of functions.

- `Lambda`: a function as a layer
- `Sample`: a layer that draws from the distribution it is given
- `Sequential`: `nn.Sequential` that also takes functions and names, and several arguments
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import methodcaller
from typing import Any, Generic, Self, TypeVar, cast, overload

from torch import Tensor, nn
from torch.distributions import Distribution

__all__ = ["Lambda", "Sample", "Sequential"]

Result = TypeVar("Result")
Layer = TypeVar("Layer", bound=nn.Module)


class Lambda(nn.Module, Generic[Result]):
    """A function as a layer; what else it is given at the start, it is called with each time.

    >>> import torch
    >>> layer = Lambda(torch.clamp, min=0.0)
    >>> layer(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    >>> layer
    Lambda(f=functools.partial(torch.clamp, min=0.0))

    Args:
        f: any function. A module becomes a child of the layer.
        args, kwargs: bound to it with `functools.partial`, in front of what a call brings.
    """

    def __init__(self, f: Callable[..., Result], *args: Any, **kwargs: Any) -> None:
        super().__init__()
        bound = functools.partial(f, *args, **kwargs) if args or kwargs else f
        self.f: Callable[..., Result] = bound

    def forward(self, *args: Any, **kwargs: Any) -> Result:
        return self.f(*args, **kwargs)

    def extra_repr(self) -> str:
        return "" if isinstance(self.f, nn.Module) else f"f={_show(self.f)}"


def _show(function: Any) -> str:
    if isinstance(function, functools.partial):
        bound = cast("functools.partial[Any]", function)
        named = [f"{name}={value!r}" for name, value in bound.keywords.items()]
        shown = [_show(bound.func), *map(repr, bound.args), *named]
        return f"functools.partial({', '.join(shown)})"
    name = getattr(function, "__name__", None)
    home = getattr(function, "__module__", None)
    return f"{home}.{name}" if name and home else name or repr(function)  # or an object with a call


class Sample(Lambda[Tensor]):
    """Draws from the distribution that it is given.

    >>> import torch
    >>> Sample()(torch.distributions.Bernoulli(torch.tensor([0.0, 1.0])))
    tensor([0., 1.])

    Args:
        differentiable: draw with `rsample`, through which gradients flow, and not with `sample`.
    """

    def __init__(self, differentiable: bool = False) -> None:
        super().__init__(methodcaller("rsample" if differentiable else "sample"))
        self.differentiable = differentiable

    def forward(self, dist: Distribution) -> Tensor:
        return super().forward(dist)

    def extra_repr(self) -> str:
        return f"differentiable={self.differentiable}"


class Sequential(nn.Sequential, Sequence[Layer]):
    """`nn.Sequential` that makes layers of functions and takes names as keywords.

    >>> import torch
    >>> model = Sequential(lower=nn.Identity(), square=torch.square)
    >>> model
    Sequential(
      (lower): Identity()
      (square): Lambda(f=torch.square)
    )
    >>> model(torch.tensor(3.0))
    tensor(9.)

    Args:
        args: modules and functions, or one mapping of names to them.
        kwargs: modules and functions by name, instead.

    The first layer is called with all arguments of a call, each other one with what came before.
    """

    @overload
    def __init__(self, *args: Layer | Callable[..., Any]) -> None: ...
    @overload
    def __init__(self, arg: Mapping[str, Layer | Callable[..., Any]], /) -> None: ...
    @overload
    def __init__(self, **kwargs: Layer | Callable[..., Any]) -> None: ...

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if args and kwargs:
            raise TypeError(
                f"Sequential was given {len(args)} layers without a name and {len(kwargs)} with "
                f"one. Their order would be a guess. Give all of them in one way."
            )
        if len(args) == 1 and isinstance(args[0], Mapping):
            kwargs = dict(cast("Mapping[str, Any]", args[0]))
        else:
            kwargs = kwargs or {str(n): layer for n, layer in enumerate(args)}
        super().__init__(OrderedDict((name, _as_layer(f)) for name, f in kwargs.items()))

    @overload
    def __getitem__(self, idx: int) -> Layer: ...
    @overload
    def __getitem__(self, idx: slice) -> Self: ...

    def __getitem__(self, idx: int | slice) -> Layer | Self:
        return cast("Layer | Self", super().__getitem__(idx))

    def __iter__(self) -> Iterator[Layer]:
        return cast("Iterator[Layer]", super().__iter__())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not len(self):
            return cast(Any, super()).forward(*args, **kwargs)
        first, *others = self
        value = first(*args, **kwargs)
        for layer in others:
            value = layer(value)
        return value


def _as_layer(given: Any) -> nn.Module:
    return Lambda(given) if callable(given) and not isinstance(given, nn.Module) else given
