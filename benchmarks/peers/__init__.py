"""Libraries that look into a PyTorch model, each used as its own documentation says.

One file a library. It names what it is (`PACKAGE`, `SOURCE`: where the use was read), what is to be
known about its numbers (`NOTES`), why it does not do the rest (`ABSENT`), and defines some of these
functions. Each does what is done once (wrapping the model, say) and returns a function `run` that
does what is done at each use; the two are timed apart. `run.close()`, where there is one, is
the cleaning up that the documentation asks for.

| function | `run` |
|---|---|
| `capture(model, names)` | `run(*args, **kwargs)` gives `{name: output}` |
| `calls(model, names)` | the same with a list of the outputs of every call |
| `inputs(model, name, keyword=None)` | the first argument of that module, or that one |
| `edit(model, name, change)` | the output of the model with that module's output changed |
| `gradient(model, name)` | the gradient of `model(…).sum()` at that module's output |
| `stop(model, name)` | that module's output; nothing after it has run |
| `operation(model, name, function)` | what that torch function gave in that module's forward |
| `summary(model)` | a text with one line a module |
| `generate(model, names, steps)` | `run(ids)` gives a list of the outputs of every step |
| `to_disk(model, names)` | `run(batches, folder)` writes; `run.read(folder, name)` reads all rows |
| `edit_parameter(model, name, tensor)` | the model's output with that parameter replaced |
| `nested(model, name)` | an output of several tensors, if `capture` is not for that |
| `attached(model, name)` | an output that can be used in a loss; else `capture` is tried |
"""

from __future__ import annotations

import importlib
from types import ModuleType

ALL = (
    "raw", "raw_again", "hookline", "nnsight", "pyvene", "captum", "torchlens", "tdhook",
    "transformer_lens", "torchhook", "torchextractor", "layer_getter", "torchinfo",
)  # fmt: skip

# What was looked at and is not in the tables, with the reason.
LEFT_OUT = {
    "baukit": "not on the package index",
    "nnterp 1.3.0": "does not import beside nnsight 0.8.1, which pip chooses for it: "
    "No module named 'nnsight.intervention.tracing'",
    "graphpatch 0.2.3": "asks for torch<2.6",
    "sae-lens 6.54.12": "its hooks are those of TransformerLens, and it asks for one below 4",
    "surgeon-pytorch 0.0.4": "its Extract needs a model that torch.fx can trace and names nodes, "
    "not modules",
    "torch-tuner 0.1.0": "one layer per object, direct children only, and it prints on every call",
    "torchsummary 1.5.1": "torchinfo's predecessor; makes float inputs itself, so no token ids",
    "wandb 0.31.0": "`watch` logs histograms of parameters and their gradients, not activations",
}


def load(name: str) -> ModuleType:
    """Import the file of one library."""
    return importlib.import_module(f"peers.{name}")
