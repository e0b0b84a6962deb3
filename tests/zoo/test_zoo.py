"""Looking changes nothing, over architectures of every kind.

benchmarks/zoo.py makes a table of the same checks.
"""

import architectures
import handwritten
import packages
import pytest
import torch
from promises import (
    DIRECTLY,
    ITERATED,
    UNREACHED,
    WITHOUT,
    check,
    forward_and_backward,
    tensors,
)
from torch import nn

import hookline as hl

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

# One of each kind for `make test`; `make test-all` runs all that are in the list.
DIVERSE = [
    *("bert", "albert", "deberta-v2", "fnet", "modernbert", "xlnet", "reformer"),  # encoders
    *("gpt2", "llama", "bloom", "gemma3_text", "gpt_oss"),  # decoders
    *("mamba", "rwkv", "bamba", "recurrent_gemma", "qwen3_next"),  # states, linear attention
    *("mixtral", "deepseek_v3", "switch_transformers"),  # mixtures of experts
    *("t5", "bart", "led"),  # encoder and decoder
    *("vit", "swin", "resnet", "convnext", "mobilenet_v2", "detr", "segformer"),  # pictures
    *("videomae",),  # films
    *("wav2vec2", "whisper", "encodec"),  # sounds
    *("clip", "llava", "layoutlmv3"),  # several at once
    *("patchtst", "informer"),  # time series
]


def parametrized(names):
    return [pytest.param(name, marks=() if name in DIVERSE else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", parametrized(architectures.names()))
def test_looking_at_a_transformer_changes_nothing(name):
    model, arguments = architectures.build(name)
    found = check(model, forward_and_backward(arguments))
    assert found.wrong == []
    assert found.places > found.modules / 2


@pytest.mark.parametrize("name", handwritten.MODELS)
def test_looking_at_a_small_model_changes_nothing(name):
    torch.manual_seed(0)
    model, step = handwritten.MODELS[name]()
    found = check(model, step)
    assert found.wrong == []
    assert found.unsteady == []
    assert found.places > found.modules


def skip_if_missing(name):
    absent = packages.missing(name)
    if absent:
        pytest.skip(f"{', '.join(absent)} not installed; `make test-all` does it")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", packages.MODELS)
def test_looking_at_a_model_with_real_weights_changes_nothing(name):
    skip_if_missing(name)
    model, step = packages.MODELS[name]()
    found = check(model, step)
    assert found.wrong == []
    assert found.places > found.modules


@pytest.mark.slow
def test_a_script_module_is_refused_with_the_reason():
    skip_if_missing("silero-vad")
    model = packages.voice_detector()
    for where in ("", "_model", "**", "**:grad_output"):
        with pytest.raises(hl.HooklineError, match="ScriptModule, which runs outside Python"):
            with hl.capture(model, where):
                raise AssertionError("must not be entered")


def test_the_list_is_long_and_names_what_transformers_has():
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    names = architectures.names()
    assert len(names) >= 200
    assert names == sorted(set(names))
    assert set(names) <= set(MODEL_MAPPING_NAMES)
    assert len(set(DIVERSE)) == len(DIVERSE) >= 30
    assert set(DIVERSE) <= set(names)


def test_an_architecture_that_cannot_be_built_says_what_was_tried():
    with pytest.raises(architectures.CannotBuild, match="run with"):
        architectures.build("decision_transformer")  # it wants states, actions, returns …


# -- the check itself -----------------------------------------------------------------------------


class Sly(nn.Module):
    """A model that notices hooks on its layer, and then does what it is told."""

    def __init__(self, does):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.does = does

    def forward(self, x):
        y = self.layer(x)
        return self.does(self, y) if self.layer._forward_hooks else y


def larger(model, y):
    return y + 1e-6


def other_gradient(model, y):
    y.register_hook(lambda grad: grad * 2)
    return y


def random(model, y):
    torch.rand(1)
    return y


def attribute(model, y):
    model.seen = True
    return y


def hook(model, y):
    model.layer.register_forward_pre_hook(lambda module, args: None)
    return y


def warning(model, y):
    import warnings

    warnings.warn("looked at", UserWarning, stacklevel=1)
    return y


def again(model, y):
    model.layer.forward(y)  # runs no hooks
    return y.clone()


@pytest.mark.parametrize(
    ("does", "complaint"),
    [
        (larger, "output 0"),
        (other_gradient, "gradient layer.weight"),
        (random, "random state"),
        (attribute, "attribute of '' left behind"),
        (hook, "_forward_pre_hooks of 'layer' left behind"),
        (warning, "warns: looked at"),
    ],
)
def test_the_check_sees_what_a_capture_would_change(does, complaint):
    found = check(Sly(does), forward_and_backward({"x": torch.randn(2, 3)}))
    assert not found.exact
    for kind in ("outputs", "attached", "detached"):
        assert f"{kind}: {complaint}" in found.wrong


def test_the_check_is_content_with_a_model_that_does_nothing_sly():
    assert check(Sly(again), forward_and_backward({"x": torch.randn(2, 3)})).exact


def test_the_check_sees_a_value_that_hooks_by_hand_do_not_see():
    class Counting(nn.Module):
        """Gives another value to its layer each time that a new copy of it runs."""

        runs = 0

        def __init__(self):
            super().__init__()
            self.layer = nn.Identity()

        def forward(self, x):
            type(self).runs += 1
            self.layer(x + type(self).runs)
            return x * 1

    found = check(Counting(), forward_and_backward({"x": torch.randn(2, 3, requires_grad=True)}))
    assert any("layer is not what hooks by hand have seen" in line for line in found.wrong)


def test_the_check_knows_when_two_bare_runs_differ():
    class Unsteady(nn.Module):
        runs = 0

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            type(self).runs += 1
            return self.layer(x), torch.tensor(float(self.runs))

    found = check(Unsteady(), forward_and_backward({"x": torch.randn(2, 3)}))
    assert found.unsteady == ["output 1"]
    assert found.exact


def test_the_check_tells_why_modules_were_never_called():
    class Uncalled(nn.Module):
        def __init__(self):
            super().__init__()
            self.direct = nn.Linear(3, 3)
            self.without = nn.Linear(3, 3)
            self.unused = nn.Linear(3, 3)
            self.steps = nn.Sequential(nn.ReLU(), nn.ReLU())

        def forward(self, x):
            x = nn.functional.linear(self.direct.forward(x), self.without.weight)
            for step in self.steps:
                x = step(x)
            return x

    found = check(Uncalled(), forward_and_backward({"x": torch.randn(2, 3)}))
    assert found.exact
    assert found.silent == {
        "direct": DIRECTLY, "without": WITHOUT, "unused": UNREACHED, "steps": ITERATED,
    }  # fmt: skip


def test_tensors_are_found_in_structures_and_if_asked_for_in_any_object():
    class Opaque:
        def __init__(self):
            self.held = [torch.zeros(1)]

    value = {"a": (torch.ones(1), None), "b": Opaque()}
    assert len(list(tensors(value))) == 1
    assert len(list(tensors(value, opaque=True))) == 2
