"""hookline.compat.torch_tuner: values of every kind, in models where hooks of torch fail."""

import copy
from collections import namedtuple
from contextlib import chdir
from dataclasses import dataclass

import pytest
import torch
from models import perceptron
from oracles import assert_clean, cut, weigh
from torch import nn
from torch.utils.checkpoint import checkpoint
from tuner_hooks import (
    HOOK_KINDS,
    assert_equal_nested,
    outcomes,
    register,
    row_batches,
    saved_files,
    saved_names,
)

import hookline as hl
from hookline.compat.torch_tuner import Hooks

pytestmark = pytest.mark.usefixtures("folder")  # each test works in a folder of its own


# -- all values -----------------------------------------------------------------------------------


class Mix(nn.Module):
    def forward(self, x, scale, *, bias=None, name="none"):
        return x * scale + (0 if bias is None else bias)


class PassesEveryKind(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = Mix()

    def forward(self, x):
        return self.mix(x, x.exp(), bias=x[:, :1] * 2, name="given")


def test_every_argument_has_a_file_and_the_first_has_the_name_of_the_original(folder):
    model = PassesEveryKind()
    hooks = Hooks(model, 0)
    for kind in ("fh", "fph", "fbh"):
        register(hooks, kind, visualize=True)
    (x,) = row_batches(4)
    expected = []

    def keep(module, args, kwargs, output):
        values = (*args, kwargs["bias"], output)
        for value in values:
            value.retain_grad()
        expected.append(values)

    model.mix.register_forward_hook(keep, with_kwargs=True)
    weigh(model(x.requires_grad_())).backward()
    values = expected[0]
    files = {name.rpartition("/")[2]: value for name, value in saved_files(folder).items()}
    end = "_0_batch_size_4_layer_0_"
    for part, value in zip(("", "_scale", "_bias"), values, strict=False):
        assert torch.equal(files.pop(f"input{end}forward_hook_tensor{part}.pt"), value)
        assert torch.equal(files.pop(f"inputs{end}forward_prehook_tensor{part}.pt"), value)
        share = files.pop(f"grad_input{end}full_backward_hook_tensor{part}.pt")
        if part:  # of x there are other uses, too
            assert torch.equal(share, value.grad)
        else:
            assert torch.equal(share, values[3].grad * values[1])
    assert torch.equal(files.pop(f"output{end}forward_hook_tensor.pt"), values[3])
    assert torch.equal(files.pop(f"grad_output{end}full_backward_hook_tensor.pt"), values[3].grad)
    assert not files


def test_a_layer_that_is_called_by_names_only_is_saved_and_updated(folder):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = Mix()

        def forward(self, x):
            return self.mix(scale=x[:1] * 3, x=x)

    model = Named()
    hooks = Hooks(model, 0)
    register(hooks, "fph", visualize=True, noise=10.0)
    assert torch.equal(model(torch.ones(2, 1)), torch.full((2, 1), 30.0))
    values = saved_files(folder)
    first, second = values
    assert first.endswith("inputs_0_batch_size_2_layer_0_forward_prehook_tensor.pt")
    assert second.endswith("inputs_0_batch_size_2_layer_0_forward_prehook_tensor_scale.pt")
    assert torch.equal(values[first], torch.ones(2, 1))
    assert torch.equal(values[second], torch.full((1, 1), 3.0))


def test_positional_arguments_without_names_are_told_by_their_position(folder):
    class Sum(nn.Module):
        def forward(self, *values):
            return sum(values)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.sum = Sum()

        def forward(self, x):
            return self.sum(x * 1, x * 2)

    model = Model()
    hooks = Hooks(model, 0)
    register(hooks, "fph", visualize=True)
    register(hooks, "fbh", visualize=True)
    model(torch.ones(2, 1, requires_grad=True)).sum().backward()
    files = saved_names(folder)
    inputs = [name for name in files if "put_0" not in name]
    grads = [name for name in files if name.startswith("grad_input")]
    for names in (inputs, grads):
        assert [name.rpartition("tensor")[2] for name in names] == [".pt", "_1.pt"]


Pair = namedtuple("Pair", "left right")


@dataclass
class LogitsAndExtras:
    logits: torch.Tensor
    extras: dict
    note: object


class ReturnsNested(nn.Module):
    def forward(self, pair):
        left, right = pair
        return LogitsAndExtras(left + right, {"product": [left * right, 3, "word"]}, object())


class NestedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.nested = ReturnsNested()

    def forward(self, x):
        output = self.nested(Pair(x * 2, x * 3))
        return output.logits.sum() + output.extras["product"][0].sum()


def test_nested_values_are_saved_in_plain_containers(folder):
    model = NestedModel()
    register(Hooks(model, 0), "fh", visualize=True)
    x = torch.ones(2, 1)
    model(x)
    given, output = saved_files(folder).values()
    assert type(given) is tuple
    assert_equal_nested(given, (x * 2, x * 3))
    assert list(output) == ["logits", "extras", "note"]
    assert torch.equal(output["logits"], x * 5)
    assert torch.equal(output["extras"]["product"][0], x * 6)
    assert output["extras"]["product"][1:] == [3, "word"]
    assert output["note"] is None


def test_gradients_of_nested_values_have_a_file_for_each_part(folder):
    model = NestedModel()
    register(Hooks(model, 0), "fbh", visualize=True)
    x = torch.ones(2, 1, requires_grad=True)
    model(x).backward()
    found = {
        name.rpartition("/")[2].replace("_0_batch_size_2_layer_0_full_backward_hook_tensor", ""): v
        for name, v in saved_files(folder).items()
    }
    assert {name: value[0].item() for name, value in found.items()} == {
        "grad_input_pair.left.pt": 4.0,
        "grad_input_pair.right.pt": 3.0,
        "grad_output_logits.pt": 1.0,
        "grad_output_extras.product.0.pt": 1.0,
    }


def test_a_list_that_holds_itself_is_saved(folder):
    class Odd(nn.Module):
        def forward(self, x):
            found = [x]
            found.append(found)
            return found

    model = nn.Sequential(Odd())
    register(Hooks(model, 0), "fh", visualize=True)
    model(torch.ones(2))
    output = list(saved_files(folder).values())[1]
    assert torch.equal(output[0], torch.ones(2))
    assert output[1] is None


def test_the_gradients_of_an_lstm_are_saved_where_the_loss_uses_one_state(folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LSTM(3, 4, batch_first=True))
    register(Hooks(model, 0), "fbh", visualize=True)
    x = torch.randn(5, 2, 3, requires_grad=True)
    _, (hidden, _) = model(x)
    weigh(hidden).backward()
    files = saved_files(folder)
    end = "0_batch_size_1_layer_0_full_backward_hook_tensor"
    assert sorted(name.rpartition("/")[2] for name in files) == [
        f"grad_input_{end}.pt", f"grad_output_{end}_1.0.pt"
    ]  # fmt: skip
    share, grad = files.values()
    assert torch.equal(share, x.grad)
    assert torch.equal(grad, torch.linspace(-1, 1, 20).reshape(1, 5, 4))


def test_a_value_without_a_batch_dimension_counts_as_one(folder):
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.loss = nn.MSELoss()

        def forward(self, x):
            return self.loss(x, x + 1)

    model = Loss()
    register(Hooks(model, 0), "fbph", visualize=True)
    model(torch.ones(4, requires_grad=True)).backward()
    assert saved_names(folder) == [
        "grad_output_0_batch_size_1_layer_0_full_backward_prehook_tensor.pt"
    ]


def test_a_layer_without_tensors_saves_nothing(folder):
    class Name(nn.Module):
        def forward(self, text):
            return text.upper()

    model = nn.Sequential(Name())
    for kind in HOOK_KINDS:
        register(Hooks(model, 0), kind, visualize=True)
    assert model("a") == "A"
    assert not list(folder.iterdir())


# -- models that torch's own hooks cannot serve ---------------------------------------------------


@pytest.mark.parametrize("gradients", [True, False])
def test_the_input_of_an_in_place_layer_is_saved_as_it_was(folder, gradients):
    model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
    register(Hooks(model, 1), "fh", visualize=True)
    x = torch.tensor([-1.0, 2.0], requires_grad=gradients)
    model(x * 1)
    given, output = saved_files(folder).values()
    assert given.tolist() == [-1.0, 2.0]
    assert output.tolist() == [0.0, 2.0]


@pytest.mark.parametrize("layer", [0, 1])
def test_gradients_around_in_place_layers_are_exact(folder, layer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    same = copy.deepcopy(model)
    register(Hooks(model, layer), "fbh", visualize=True)
    (x,) = row_batches(6)
    given = same[:layer](x).detach()
    rest = same[layer + 1 :]
    expected, (share,) = cut((same[0], nn.ReLU())[layer], [given], lambda y: weigh(rest(y)))
    weigh(model(x.requires_grad_())).backward()
    grad_input, grad_output = saved_files(folder).values()
    assert torch.equal(grad_input, share)
    assert torch.equal(grad_output, expected)


class ResidualLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return x * 2 + self.inner(x)


@pytest.mark.parametrize(
    "layer", [nn.Identity, ResidualLinear, lambda: nn.Dropout(0.5).eval(), nn.Flatten]
)
def test_gradients_are_those_of_torchs_full_backward_hook(folder, layer):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = layer()
            self.first = nn.Linear(3, 3)

        def forward(self, x):
            x = self.first(x)
            return self.layer(x).square() + x.exp() + self.layer(x * 2)

    model, seen = Model(), []
    (x,) = row_batches(4)
    handle = model.layer.register_full_backward_hook(lambda m, gi, go: seen.append((gi[0], go[0])))
    weigh(model(x)).backward()
    handle.remove()
    register(Hooks(model, "layer"), "fbh", visualize=True)
    weigh(model(x)).backward()
    files = list(saved_files(folder).values())
    inputs, outputs = files[:2], files[2:]
    assert len(seen) == 2
    for n, (share, grad) in enumerate(seen):
        torch.testing.assert_close(inputs[n], share, rtol=1e-6, atol=1e-6)
        assert torch.equal(outputs[n], grad)


def test_a_gradient_that_is_lost_is_told_on_removing():
    model = nn.Sequential(nn.Linear(3, 4), nn.Flatten(0), nn.ReLU(inplace=True))
    handle = register(Hooks(model, 1), "fbph", visualize=True)
    weigh(model(*row_batches(2))).backward()
    with pytest.warns(hl.HooklineWarning, match=r"'1:grad_output' cannot be saved: .*is a view"):
        handle.remove()
    assert_clean(model)


def test_a_gradient_that_cannot_be_reached_is_told_at_once(folder):
    model = nn.Sequential(nn.Linear(3, 4), nn.Flatten(0), nn.ReLU(inplace=True))
    register(Hooks(model, 2), "fbh", visualize=True)
    with pytest.warns(hl.HooklineWarning, match=r"'2:grad_inputs' cannot be saved: .*in place"):
        weigh(model(*row_batches(2))).backward()
    (name,) = saved_names(folder)
    assert name.startswith("grad_output_0_")


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_checkpointing_runs_again_is_saved_once(folder, reentrant):
    def run_plainly(model, x):
        return model(x)

    def run_again(model, x):
        return checkpoint(model, x, use_reentrant=reentrant)

    for run in (run_plainly, run_again):
        model = perceptron()
        place = folder / run.__name__
        place.mkdir()
        with chdir(place):
            for kind in HOOK_KINDS:
                register(Hooks(model, 2), kind, visualize=True)
            for x in row_batches(4, 4, 2):
                weigh(run(model, x.requires_grad_())).backward()
    expected, found = saved_files(folder / "run_plainly"), saved_files(folder / "run_again")
    assert list(found) == list(expected)
    assert len(found) == 3 * 6
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_call_that_raises_is_not_saved_and_the_next_one_is_right(folder):
    class Picky(nn.Module):
        def forward(self, x):
            if x.sum() < 0:
                raise ValueError("negative")
            return x * 2

    model = nn.Sequential(Picky())
    register(Hooks(model, 0), "fh", visualize=True)
    model(torch.tensor([1.0]))
    with pytest.raises(ValueError, match="negative"):
        model(torch.tensor([-5.0]))
    model(torch.tensor([3.0]))
    assert [value.item() for value in saved_files(folder).values()] == [1.0, 3.0, 2.0, 6.0]


def test_inputs_and_outputs_of_a_recursive_layer_belong_together(folder):
    class Deep(nn.Module):
        def forward(self, x, depth):
            return x * 2 if depth == 0 else self(x + 1, depth - 1) * 2

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.deep = Deep()

        def forward(self, x):
            return self.deep(x, 2)

    model = Model()
    register(Hooks(model, 0), "fh", visualize=True)
    model(torch.zeros(1))
    assert [v.item() for v in saved_files(folder).values()] == [2.0, 1.0, 0.0, 4.0, 8.0, 16.0]


def test_a_backward_that_raises_does_no_harm_to_the_next(folder):
    model = perceptron()
    register(Hooks(model, 2), "fbh", visualize=True)
    x = row_batches(4)[0].requires_grad_()
    broken = x * 1

    def fail(grad):
        raise RuntimeError("on purpose")

    broken.register_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        weigh(model(broken)).backward()
    assert saved_names(folder) == []
    outcomes(model, row_batches(4))
    expected = [
        f"grad_{w}put_0_batch_size_4_layer_2_full_backward_hook_tensor.pt" for w in ("in", "out")
    ]
    assert saved_names(folder) == expected


def test_a_copied_model_saves_nothing(folder):
    model = perceptron()
    for kind in HOOK_KINDS:
        register(Hooks(model, 2), kind, visualize=True)
    outcomes(copy.deepcopy(model), row_batches(4))
    assert saved_names(folder) == []
    outcomes(model, row_batches(4))
    assert len(saved_names(folder)) == 6


# -- updates of all kinds of values ---------------------------------------------------------------


def test_an_update_of_the_first_input_leaves_the_others_as_they_are():
    model = PassesEveryKind()
    x = torch.ones(2, 2)
    register(Hooks(model, 0), "fph", noise=10.0)
    assert torch.equal(model(x), 10 * x * x.exp() + 2)


def test_an_update_of_a_gradient_leaves_those_of_other_inputs_as_they_are():
    model = PassesEveryKind()
    register(Hooks(model, 0), "fbh", values=torch.full((2, 2), 100.0))
    x = torch.zeros(2, 2, requires_grad=True)
    model(x).sum().backward()
    # By x 100, by the exponential 0, by the bias 2 times 2.
    assert x.grad.tolist() == [[104.0, 100.0], [104.0, 100.0]]


def test_noise_meets_every_floating_point_tensor_of_a_nested_output():
    model = nn.Sequential(nn.MaxPool1d(2, return_indices=True))
    register(Hooks(model, 0), "fh", noise=0.5)
    value, indices = model(torch.tensor([[1.0, 4.0, 2.0, 0.0]]))
    assert value.tolist() == [[2.0, 1.0]]
    assert indices.tolist() == [[1, 2]]


def test_new_values_of_a_nested_output_are_nested_likewise():
    model = nn.Sequential(nn.LSTM(3, 4))
    new = (torch.ones(2, 5, 4), (torch.ones(1, 5, 4) * 2, torch.ones(1, 5, 4) * 3))
    handle = register(Hooks(model, 0), "fh", values=new, noise=2.0)
    output, (hidden, cell) = model(torch.zeros(2, 5, 3))
    assert (output.unique().item(), hidden.unique().item(), cell.unique().item()) == (2, 4, 6)
    handle.remove()
    register(Hooks(model, 0), "fh", values=new[0])
    with pytest.raises(
        hl.ChangeError, match=r"'0' .* holds \[0\], \[1\]\[0\], \[1\]\[1\], the new"
    ):
        model(torch.zeros(2, 5, 3))


def test_the_only_tensor_of_a_nested_output_takes_a_tensor_or_the_same_structure():
    class Boxed(nn.Module):
        def forward(self, x):
            return {"box": (x,)}

    model = nn.Sequential(Boxed())
    new = torch.ones(2)
    for values in (new, {"box": (new,)}):
        with register(Hooks(model, 0), "fh", values=values):
            assert torch.equal(model(torch.zeros(2))["box"][0], new)


def test_noise_meets_the_gradients_of_all_parts_and_new_values_are_refused_there():
    model = nn.Sequential(nn.LSTM(3, 4))
    x = torch.ones(2, 5, 3, requires_grad=True)

    def gradient():
        x.grad = None
        output, (hidden, _) = model(x)
        (output.sum() + hidden.sum()).backward()
        return x.grad

    expected = gradient() * 4
    with register(Hooks(model, 0), "fbph", noise=4.0):
        assert torch.equal(gradient(), expected)
    with register(Hooks(model, 0), "fbph", values=torch.ones(1, 5, 4)):
        with pytest.raises(hl.SeveralTensors, match="'0:grad_output'"):
            gradient()


def test_gradients_flow_into_new_values_and_new_values_stay_as_they_are():
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(inplace=True))
    values = torch.tensor([[-1.0, 2.0]], requires_grad=True)
    register(Hooks(model, 0), "fh", values=values)
    model(torch.ones(1, 3)).sum().backward()
    assert values.tolist() == [[-1.0, 2.0]]
    assert values.grad.tolist() == [[0.0, 1.0]]


def test_noise_of_one_dimension_lies_along_the_last_as_in_torch():
    x = torch.ones(2, 3, 3, 3)
    noise = torch.tensor([1.0, 2.0, 3.0])
    model = nn.Sequential(nn.Identity())
    register(Hooks(model, 0), "fh", noise=noise)
    assert torch.equal(model(x), x * noise)
    assert torch.equal(model(x[0, 0, 0]), noise)


def test_noise_of_another_precision_keeps_that_of_the_value():
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 2))
    register(Hooks(model, 0), "fh", noise=torch.full((2,), 2.0, dtype=torch.float64))
    assert model(torch.ones(1, 2)).dtype == torch.float32
