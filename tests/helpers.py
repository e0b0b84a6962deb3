"""What several test files check: that nothing is left behind."""

from torch import nn

HOOK_DICTS = (
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def hooks_left(model: nn.Module) -> list[str]:
    """Every hook that is on a module, parameter or buffer of a model, by its address."""
    found = [
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name in HOOK_DICTS
        if len(module.__dict__[name])
    ]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    found += [f"{path}._backward_hooks" for path, tensor in tensors if tensor._backward_hooks]
    return found


def assert_clean(*models: nn.Module) -> None:
    """No hook is left in any hook dict of any module, nor on a parameter or buffer."""
    for model in models:
        assert hooks_left(model) == []
