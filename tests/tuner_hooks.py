"""The hooks of torch-tuner: what each kind is called, saves and changes."""

import torch
from oracles import weigh

HOOK_KINDS = ("fh", "fph", "fbh", "fbph")
FOLDERS = {
    "fh": "saved_forward_hook_values",
    "fph": "saved_forward_prehook_inputs",
    "fbh": "saved_full_backward_hook_gradients",
    "fbph": "saved_full_backward_prehook_gradients",
}
PORTS = {"fh": "", "fph": ":input", "fbh": ":grad_input", "fbph": ":grad_output"}
CHANGED = {"fh": "output", "fph": "input", "fbh": "input", "fbph": "output"}  # by updates


def saved_files(folder):
    """All files in a folder by name, with what is in them."""
    return {
        file.relative_to(folder).as_posix(): torch.load(file, weights_only=True)
        for file in sorted(folder.rglob("*.pt"))
    }


def saved_names(folder):
    """The names of these files, without their folders."""
    return [name.rpartition("/")[2] for name in saved_files(folder)]


def row_batches(*sizes):
    """Batches of so many rows each, the same every time."""
    torch.manual_seed(1)
    return [torch.randn(size, 3) for size in sizes]


def outcomes(model, data):
    """Forward and backward for each batch; everything that came out."""
    found = []
    for batch in data:
        x = batch.clone().requires_grad_()
        model.zero_grad()
        y = model(x)
        weigh(y).backward()
        grads = [x.grad, *(parameter.grad for parameter in model.parameters())]
        found += [y.detach(), *(torch.empty(0) if grad is None else grad for grad in grads)]
    return found


def register(hooks, kind, *, noise=None, values=None, visualize=False, **more):
    """Register a hook of a kind, with the arguments that it has."""
    word = CHANGED[kind]
    given = {}
    if noise is not None:
        given |= {f"add_noise_{word}": True, f"noise_{word}": noise}
    if values is not None:
        given |= {f"add_values_{word}": True, f"new_values_{word}": values}
    method = getattr(hooks, f"register_{kind}")
    return method(update=bool(given), visualize=visualize, **given, **more)


def assert_equal_nested(one, other):
    """Tensors, or tuples of them, are equal."""
    if isinstance(other, tuple):
        assert isinstance(one, tuple)
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal_nested(a, b)
    else:
        assert torch.equal(one, other)
