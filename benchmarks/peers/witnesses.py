"""What the probes look at a model with: its hooks, its state, the tensors in a value."""

from __future__ import annotations


def flat(value):
    """The tensors in tuples and lists."""
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in flat(part)]
    return [value]


def tidy(run):
    """Clean up as the documentation says, where it says that one must."""
    if hasattr(run, "close"):
        run.close()


def hooks_on(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def state_of(model):
    """All that a library could have changed on a model, but for values."""
    return {
        name: (
            id(module), type(module), module.training, sorted(set(vars(module)) - {"config"}),
            [(key, id(p), p.requires_grad) for key, p in module.named_parameters(recurse=False)],
        )
        for name, module in model.named_modules()
    }  # fmt: skip
