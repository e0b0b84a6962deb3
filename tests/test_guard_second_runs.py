"""guard where a call cannot be repeated: from then on every module is checked."""

import math
import weakref

import pytest
import torch
from faults import fault_in, guarded
from models import Giving, Mark, Token
from oracles import assert_clean
from torch import nn

import hookline as hl

pytestmark = [
    pytest.mark.usefixtures("seeded"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


def test_inputs_that_were_changed_in_place_are_noticed_and_modules_checked_from_then_on():
    model = nn.Sequential(Giving(lambda x: x.add_(1)), nn.Linear(3, 3), Giving(lambda x: x / 0))
    guard = guarded(model)
    with pytest.raises(hl.NonFiniteError) as found, guard:
        model(torch.ones(3))
    fault = found.value.fault
    assert fault.kind == "unknown"
    assert "input input was changed in place" in fault.remarks[0]
    assert guard.careful
    with pytest.raises(hl.NonFiniteError) as found, guard:
        model(torch.ones(3))
    assert (found.value.fault.kind, found.value.fault.place) == ("module", "2")
    assert [label for label, _ in found.value.fault.given] == ["0"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_a_model_writes_into_its_input_did_not_come_in_with_it(mode):
    model = nn.Sequential(nn.Identity(), Giving(lambda x: x.sub_(2).log_()), nn.Linear(3, 3))

    def run():
        with mode():
            model(torch.ones(2, 3))

    with guarded(model) as guard:
        for kind, place in (("unknown", ""), ("module", "1")):
            with pytest.raises(hl.NonFiniteError) as found:
                run()
            assert (found.value.fault.kind, found.value.fault.place) == (kind, place)
        assert guard.careful


def test_inputs_are_copied_as_soon_as_a_call_was_seen_to_change_them():
    model = nn.Sequential(Giving(lambda x: x.add_(1)), nn.Linear(3, 3), Giving(torch.abs))
    weight = model[1].weight

    def run():
        model(torch.ones(3))
        model[2].function = lambda x: x.log() if x.sum() > 5 else x / 0
        nn.init.ones_(weight), nn.init.zeros_(model[1].bias)
        x = torch.zeros(3)
        model(x - 1)  # makes 0 / 0; a second run on the changed input would take the logarithm

    fault = fault_in(run, model)
    assert (fault.step, fault.place) == (1, "2/div")


def test_where_graphs_are_held_only_few_are():
    tokens = []

    def marked(x):
        token = Token()
        tokens.append(weakref.ref(token))
        return Mark.apply(x, token)

    def graphs_alive():
        return sum(token() is not None for token in tokens)

    model = nn.Sequential(nn.Linear(3, 3), Giving(marked))
    guard = guarded(model, careful=True).attach()
    for _ in range(10):
        model(torch.ones(3))
    assert graphs_alive() == 4
    model(torch.ones(3)).sum().backward()
    assert graphs_alive() == 3
    assert repr(guard) == "<hookline guard of Sequential, every module, attached>"
    guard.remove()
    assert repr(guard) == "<hookline guard of Sequential, every module, closed>"
    assert graphs_alive() == 0


def test_an_attached_guard_checks_modules_after_a_call_that_it_could_not_repeat():
    state = iter(range(100))  # no rerun is like the first run
    model = nn.Sequential(
        nn.Linear(3, 3), Giving(lambda x: x / 0 if next(state) in (0, 2) else x), nn.Linear(3, 3)
    )
    guard = guarded(model).attach()
    with pytest.raises(hl.NonFiniteError) as found:
        model(torch.ones(3))
    assert found.value.fault.kind == "unknown"
    assert "second run gave finite values" in str(found.value)
    with pytest.raises(hl.NonFiniteError) as found:
        model(torch.ones(3))
    assert (found.value.fault.kind, found.value.fault.place) == ("module", "1")
    guard.remove()
    assert_clean(model)


def test_a_second_run_that_is_bad_elsewhere_is_told_so():
    state = iter(range(100))

    def changing(x):
        x = x.clone()
        x[next(state)] = math.nan
        return x

    model = nn.Sequential(nn.Identity(), Giving(changing))
    fault = fault_in(lambda: model(torch.ones(30)), model)
    assert fault.place == "1/setitem"
    assert "bad at other places" in fault.remarks[0]


def test_weights_that_were_stepped_since_are_noticed():
    """A backward after the step: the call is not what it was."""
    model = nn.Sequential(nn.Linear(3, 3), Giving(torch.sqrt))
    nn.init.zeros_(model[0].weight), nn.init.zeros_(model[0].bias)

    def run():
        out = model(torch.ones(3))
        model[0].bias.data += 0  # not seen by torch
        with torch.no_grad():
            model[0].bias.add_(1)
        out.sum().backward()

    fault = fault_in(run, model)
    assert fault.kind == "unknown"
    assert "optimiser" in fault.remarks[0]
    assert "the gradient of '0.weight'" in [label for label, _ in fault.seen]


def test_an_opaque_argument_is_doubted():
    class Cache:
        pass

    model = Giving(lambda x, cache: x / 0)
    fault = fault_in(lambda: model(torch.ones(3), Cache()), model)
    assert "given a Cache" in fault.remarks[0]


CAREFUL = {
    "leaf": (lambda: nn.Sequential(nn.Linear(3, 3), Giving(torch.log)), torch.zeros(3), "1"),
    "own forward": (
        lambda: Giving(nn.Sequential(nn.Linear(3, 3), Giving(lambda x: x / 0), nn.Linear(3, 3))),
        torch.ones(3), "function.1",
    ),
}  # fmt: skip


class DividesBetween(nn.Module):
    """Makes the bad number between two children."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.b(self.a(x) / 0)


def test_where_modules_are_checked_the_innermost_producer_is_named():
    for make, x, place in CAREFUL.values():
        model = make()
        if isinstance(model, nn.Sequential):
            nn.init.zeros_(model[0].bias)
        fault = fault_in(lambda: model(x), model, careful=True)  # noqa: B023
        assert (fault.kind, fault.place) == ("module", place)
    model = nn.Sequential(DividesBetween(), nn.Identity())
    fault = fault_in(lambda: model(torch.ones(3)), model, careful=True)
    assert (fault.kind, fault.place) == ("module", "0")


def test_where_modules_are_checked_bad_parameters_and_inputs_are_told_apart():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    fault = fault_in(lambda: model(torch.full((3,), math.nan)), model, careful=True)
    assert (fault.kind, fault.place) == ("input", ":inputs[input]")
    model[2].bias.data[0] = math.nan
    fault = fault_in(lambda: model(torch.ones(3)), model, careful=True)
    assert (fault.kind, fault.place) == ("parameter", "2.bias")


def test_where_modules_are_checked_a_backward_is_looked_into_as_it_runs():
    model = nn.Sequential(nn.Linear(3, 3), Giving(lambda x: (x * 0).sqrt()), nn.Linear(3, 3))
    fault = fault_in(lambda: model(torch.ones(3)).sum().backward(), model, careful=True)
    assert (fault.backward, fault.path, fault.node) == (True, "1", "SqrtBackward0")
