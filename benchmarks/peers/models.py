"""The models that the libraries are tried on.

- `plain` the transformer of 163 modules of benchmarks/transformer.py, in a tiny and a larger size
- `gpt2` a GPT-2 of transformers from a config, with random weights
- `tokenizer` one for it, which some libraries ask for
- `Residual` a model of three layers for the probes, which keeps what it returned
"""

from __future__ import annotations

import functools
import tempfile

import torch
import transformer
from torch import Tensor, nn

LARGE = transformer.Size("1 MB", batch=32, length=128, width=64)
GPT2_WIDTH, GPT2_WORDS = 32, 100


def plain(size: transformer.Size = transformer.TINY) -> tuple[nn.Module, Tensor]:
    model, batch = size.build()
    model.width = size.width  # tdhook must be told how wide a layer is
    return model.eval(), batch


def plain_blocks() -> list[str]:
    return [f"blocks.{i}" for i in range(12)]


def plain_modules(model: nn.Module) -> list[str]:
    """All 161 modules that are called, but for the model itself."""
    return [name for name, _ in model.named_modules() if name not in ("", "blocks")]


def gpt2() -> tuple[nn.Module, Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=12, n_embd=GPT2_WIDTH, n_head=2, n_positions=64, vocab_size=GPT2_WORDS,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    model.width = GPT2_WIDTH
    return model, torch.randint(1, GPT2_WORDS, (1, 5))


def gpt2_blocks() -> list[str]:
    return [f"transformer.h.{i}" for i in range(12)]


@functools.cache
def tokenizer():
    """A tokenizer with a word for each number; read back from a folder, so that it has a name."""
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = models.WordLevel({f"t{i}": i for i in range(GPT2_WORDS)}, unk_token="t0")
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "t0")
    folder = tempfile.mkdtemp()
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


class Residual(nn.Module):
    """Three layers with a name each. `seen` is what the last forward returned, for a witness."""

    def __init__(self, width: int = 4, last: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.width = width
        self.first = nn.Linear(width, width)
        self.middle = nn.Linear(width, width)
        self.last = last or nn.Linear(width, width)
        self.unused = nn.Linear(width, width)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(x + self.middle(torch.tanh(self.first(x))))
        self.seen = y
        return y
