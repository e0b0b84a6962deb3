"""The kinds of hooks of torch-tuner: their names, folders, ports, and registration."""

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
    """Return the tensors of all files in a folder, by name."""
    return {
        file.relative_to(folder).as_posix(): torch.load(file, weights_only=True)
        for file in sorted(folder.rglob("*.pt"))
    }


def saved_names(folder):
    """Return the names of all files, without their folders."""
    return [name.rpartition("/")[2] for name in saved_files(folder)]


def row_batches(*sizes):
    """Return batches of the given sizes, the same every time."""
    torch.manual_seed(1)
    return [torch.randn(size, 3) for size in sizes]


def outcomes(model, data):
    """Run forward and backward for each batch. Return all outputs and gradients."""
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
    """Register a hook of a kind, with the arguments that this kind takes."""
    word = CHANGED[kind]
    given = {}
    if noise is not None:
        given |= {f"add_noise_{word}": True, f"noise_{word}": noise}
    if values is not None:
        given |= {f"add_values_{word}": True, f"new_values_{word}": values}
    method = getattr(hooks, f"register_{kind}")
    return method(update=bool(given), visualize=visualize, **given, **more)


def assert_equal_nested(one, other):
    """Check that tensors, or tuples of them, are equal."""
    if isinstance(other, tuple):
        assert isinstance(one, tuple)
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal_nested(a, b)
    else:
        assert torch.equal(one, other)
