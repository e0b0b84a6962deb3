"""Models that several test files use, most of them awkward in one way."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn

# -- sequences of layers --------------------------------------------------------------------------


def small(seed: int | None = None) -> nn.Sequential:
    """Linear, ReLU, Linear: 3 → 4 → 2. With a seed the weights are the same every time."""
    if seed is not None:
        torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def mlp() -> nn.Sequential:
    """Linear, Tanh, Linear: 3 → 4 → 2, with the same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def overwriting_mlp(seed: int = 0) -> nn.Sequential:
    """Linear, ReLU in place, Linear, Tanh: 4 → 6 → 3, in evaluation mode."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3), nn.Tanh()).eval()


def perceptron():
    """Linear layers with Tanh between them: 3 → 4 → 5 → 2, with the same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def nested_sequence():
    """Return a Sequential with named children inside another one."""
    inner = nn.Sequential(
        OrderedDict(a=nn.Linear(3, 3), b=nn.Tanh(), c=nn.Linear(3, 3), d=nn.Sigmoid())
    )
    return nn.Sequential(
        OrderedDict(first=nn.Linear(3, 3), inner=inner, act=nn.ReLU(), last=nn.Linear(3, 3))
    )


def named(*names: str) -> nn.Sequential:
    """Return a model whose children have these names."""
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Identity())
    return model


def convolutions():
    """Return a small network for images, with BatchNorm, dropout and an in-place ReLU."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Dropout(0.3), nn.Flatten(), nn.Linear(36, 3),
    )  # fmt: skip


# -- functions, loops and errors ------------------------------------------------------------------


class Giving(nn.Module):
    """Calls a function of its arguments, or returns a fixed value."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.function(*args, **kwargs) if callable(self.function) else self.function


class OneOfTwo(nn.Module):
    """Has two layers and runs the first."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class SometimesTuple(nn.Module):
    """Returns a tensor, or a tuple if it is given something more."""

    def forward(self, x: torch.Tensor, extra: object = None, fails: bool = False) -> object:
        if fails:
            raise ValueError("as asked")
        return x * 2 if extra is None else (x + extra,)


class LargeBatches(nn.Module):
    """Runs its second layer on large batches only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = self.h[0](x)
        return self.h[2](self.h[1](x) if len(x) > 2 else x)


class Recursive(nn.Module):
    """Calls itself until the depth is zero, doubling on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, depth: int = 0) -> torch.Tensor:
        return self.lin(x) if depth == 0 else self(x + depth, depth - 1) * 2


class CellLoop(nn.Module):
    """Calls an LSTM cell and a layer once per step."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(3, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        state, results = None, []
        for step in x:
            state = self.cell(step, state)
            results.append(self.out(state[0]))
        return torch.stack(results)


class Failing(nn.Module):
    """Raises an error after its first layer has run."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.error is not None:
            raise self.error
        return self.second(x)


class Swallowing(nn.Module):
    """Runs a layer in a `try` that catches errors of one type."""

    def __init__(self, caught: type[BaseException]) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.caught = caught

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            x = self.first(x)
        except self.caught:
            x = x + 1
        return self.second(x)


# -- several outputs, views and writes in place ---------------------------------------------------


class ReturnsPair(nn.Module):
    """Returns two values, each made of its input."""

    def forward(self, x):
        return x * 1, x * 3


class ChangesItsPair(nn.Module):
    """Changes the second of two outputs of a child in place."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.pair = ReturnsPair()

    def forward(self, x):
        p, q = self.pair(self.first(x))
        q.mul_(2)
        return p + q


class InPlace(nn.Module):
    """A layer whose output the next layer overwrites in place."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.lin(x))


class EndsInLinear(nn.Module):
    """Returns the output of its last layer: for 3-D input, a view."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class QueryKeyValue(nn.Module):
    """Returns three views of one projection."""

    def __init__(self, width: int = 4, split=lambda h: h.chunk(3, -1)) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 3 * width)
        self.split = split

    def forward(self, x: torch.Tensor):
        return tuple(self.split(self.proj(x)))


def as_nested(x, layout=torch.strided):
    """Return a nested tensor of the first row and of all others."""
    return torch.nested.as_nested_tensor([x[:1], x[1:]], layout=layout)


# Modules whose output has new memory, whether or not it is a view; and the shapes of their inputs.
MAKERS = {
    "Linear": (lambda: nn.Linear(4, 4), [(2, 4)]),
    "Linear 3-D": (lambda: nn.Linear(4, 4), [(2, 3, 4)]),
    "Linear 4-D": (lambda: nn.Linear(4, 4), [(2, 3, 2, 4)]),
    "Linear 1-D": (lambda: nn.Linear(4, 4), [(4,)]),
    "Linear without bias 3-D": (lambda: nn.Linear(4, 4, bias=False), [(2, 3, 4)]),
    "Sequential with Linear 3-D": (lambda: nn.Sequential(nn.Linear(4, 4)), [(2, 3, 4)]),
    "block that ends in Linear 3-D": (EndsInLinear, [(2, 3, 4)]),
    "Conv2d": (lambda: nn.Conv2d(3, 2, 2), [(2, 3, 4, 4)]),
    "Conv2d unbatched": (lambda: nn.Conv2d(3, 2, 2), [(3, 4, 4)]),
    "Conv1d": (lambda: nn.Conv1d(3, 2, 2), [(2, 3, 4)]),
    "ConvTranspose1d unbatched": (lambda: nn.ConvTranspose1d(3, 2, 2), [(3, 4)]),
    "AvgPool1d": (lambda: nn.AvgPool1d(2), [(2, 3, 4)]),
    "AdaptiveAvgPool1d": (lambda: nn.AdaptiveAvgPool1d(2), [(2, 3, 4)]),
    "MaxPool1d": (lambda: nn.MaxPool1d(2), [(2, 3, 4)]),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(3), [(2, 3, 4)]),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), [(2, 4, 3)]),
    "LayerNorm": (lambda: nn.LayerNorm(4), [(2, 4)]),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), [(3, 4)]),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), [(1, 4, 2, 2)]),
    "Bilinear": (lambda: nn.Bilinear(4, 4, 3), [(2, 3, 4), (2, 3, 4)]),
    "EncoderLayer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0), [(3, 2, 4)]),
    "a transpose": (lambda: Giving(lambda x: (x * 2).transpose(-1, -2)), [(2, 3, 4)]),
    "a selection": (lambda: Giving(lambda x: (x * 2)[:, 0]), [(2, 3, 4)]),
    "every other one": (lambda: Giving(lambda x: (x * 2)[:, ::2]), [(2, 3, 4)]),
    "a part in a Sequential": (
        lambda: nn.Sequential(nn.Linear(4, 4), Giving(lambda x: x.view(-1)[2:])),
        [(2, 4)],
    ),
    "input used twice": (lambda: Giving(lambda x: x * 2 + x.sin()), [(2, 4)]),
    "inputs that multiply": (lambda: Giving(lambda x, y: x * y + y), [(2, 4), (2, 4)]),
}

# Modules whose output is a view of their input, and the shape of it.
VIEWERS = {
    "Flatten": (nn.Flatten, (2, 3, 2)),
    "Unflatten": (lambda: nn.Unflatten(1, (2, 2)), (2, 4)),
    "a transpose of the input": (lambda: Giving(lambda x: x.transpose(0, 1)), (2, 3)),
    "a part of the input": (lambda: Giving(lambda x: x[:, 1:]), (2, 3)),
    "an expansion of the input": (lambda: Giving(lambda x: x.expand(3, 2, 3)), (2, 3)),
    "a view in a Sequential": (lambda: nn.Sequential(nn.Flatten()), (2, 3, 2)),
}


# -- parameters and buffers -----------------------------------------------------------------------


class TiedLayers(nn.Module):
    """Two layers that share one weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encode = nn.Linear(3, 3)
        self.decode = nn.Linear(3, 3)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.decode(torch.tanh(self.encode(x)))


class Blocks(nn.Module):
    """Has a ModuleList, a ParameterList, and a buffer that is None until the first call."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(3))])
        self.register_buffer("mask", None)

    def forward(self, x):
        self.mask = torch.ones(3)
        for layer in self.layers:
            x = layer(x) * self.scales[0] * self.mask
        return x


class NormDropoutResidual(nn.Module):
    """Has BatchNorm, dropout, an in-place ReLU, a residual and a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 3)
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x):
        h = self.drop(self.act(self.norm(self.first(x))))
        return self.last(h + h * self.gain)


# -- transformers and texts -----------------------------------------------------------------------


def hidden_states(length: int = 5) -> torch.Tensor:
    """Return two sequences of hidden states of width 8, the same every time."""
    torch.manual_seed(1)
    return torch.randn(2, length, 8)


class SelfAttention(nn.Module):
    """Causal attention of its input with itself, by the kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


class PackedAttentionBlock(nn.Module):
    """A transformer block with one projection for query, key and value."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.up, self.down, self.heads = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            heads,
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class TiedTransformer(nn.Module):
    """A transformer of two blocks whose embedding and head share their weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([PackedAttentionBlock(), PackedAttentionBlock()])
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def torch_encoder():
    """Return a transformer encoder of torch with two layers."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class TextModel(nn.Module):
    """Takes its arguments in every form; returns a row for each token and a pooled row."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.pool = nn.Embedding(20, 5), nn.Linear(5, 5), nn.Linear(5, 7)

    def forward(self, tokens, attention_mask=None):
        if not isinstance(tokens, torch.Tensor):
            tokens = tokens.tokens
        h = self.mix(self.embed(tokens))
        return h, self.pool(h[:, 0])


# -- graphs ---------------------------------------------------------------------------------------


class Nothing(torch.autograd.Function):
    """Returns no gradient."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> None:
        return None


class Token:
    """An object in a graph of autograd: it lives as long as the graph."""


class Mark(torch.autograd.Function):
    """The identity. It stores a token in the graph."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, token: object) -> torch.Tensor:
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


# -- names that a page must escape ----------------------------------------------------------------

HOSTILE_NAMES = [
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)<",
    "\"quotes' & amp;",
    "層の名前 ✓",
    "a" * 300,
    "{*}/[0]:#",
    "__proto__",
]


def hostile_model() -> nn.Module:
    """Runs modules with hostile names, one after the other."""
    inner = nn.ModuleDict({name: nn.Linear(2, 2) for name in HOSTILE_NAMES if "." not in name})

    class Hostile(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            for module in self.inner.values():
                x = module(x)
            return x

    return Hostile()
