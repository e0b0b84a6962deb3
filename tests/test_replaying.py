"""What a guard writes can be run again, without pickle, and is read without trust."""

import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from faults import INF, fault_of
from models import Giving
from oracles import rewrite_json
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import hookline as hl
from hookline.guards.dumps import (
    ArgumentWriter,
    constructor_of,
    function_named,
    name_of,
    read_value,
)

pytestmark = pytest.mark.usefixtures("seeded")


FORWARD = {
    "log": lambda x: torch.log(x),
    "division": lambda x: x / torch.zeros(4),
    "method with a keyword": lambda x: x.softmax(dim=-1).log().div(other=torch.zeros(4)),
    "in place": lambda x: (x + 1).div_(torch.zeros(4)),
    "set item": lambda x: nan_at(x),
    "masked softmax": lambda x: x.masked_fill(x == x, -INF).softmax(-1, dtype=torch.float64),
    "functional": lambda x: F.layer_norm(x, (4,), eps=0.0),
    "cross entropy": lambda x: F.cross_entropy(x, torch.tensor([-100, -100])),
    "random numbers": lambda x: F.dropout(torch.ones(2, 4), 0.5).log(),
    "random operation": lambda x: F.dropout(torch.full((2, 4), 3e38), 0.5),
    "index": lambda x: x[:0].mean(),
    "complex": lambda x: torch.complex(x, x) / 0,
}


def nan_at(x):
    x = x.clone()
    x[..., 1:3] = math.nan
    return x


@pytest.mark.parametrize("case", FORWARD)
def test_an_operation_is_run_again_bit_for_bit_without_the_model(case, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.ReLU(), Giving(FORWARD[case]))
    fault = fault_of(model, torch.zeros(2, 4), to=tmp_path)
    assert fault.folder.parent == tmp_path
    assert sorted(file.name for file in fault.folder.iterdir()) == [
        "guard.json", "guard.safetensors",
    ]  # fmt: skip
    before = torch.get_rng_state()
    replayed = hl.replay(fault.folder)
    assert torch.equal(before, torch.get_rng_state())
    assert (replayed.reproduced, replayed.exact) == (True, True)
    assert replayed.place == fault.place
    again = hl.replay(fault.folder, model)
    assert again.reproduced
    assert "the module '1' (Giving)" in repr(again)


BACKWARD = {
    "one of several results": lambda x: torch.linalg.svd(x.mean() * torch.eye(4))[0],
    "sqrt": lambda x: (x * 0).sqrt(),
    "power": lambda x: (x * 0) ** 0.5,
    "masked division": lambda x: torch.where(x > 9, 1 / (x * 0), torch.zeros_like(x)),
    "functional": lambda x: F.layer_norm((x * 0).sqrt(), (4,)),
    "in place": lambda x: (x * 0).sqrt_(),
}


@pytest.mark.parametrize("case", BACKWARD)
def test_the_backward_of_an_operation_is_run_again_without_the_model(case, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Giving(BACKWARD[case]), nn.Linear(4, 4))
    fault = fault_of(model, torch.ones(2, 4), to=tmp_path, backward=True)
    replayed = hl.replay(fault.folder)
    assert (replayed.backward, replayed.reproduced) == (True, True)
    assert any(not g.isfinite().all() for g in replayed.gradients.values())
    grads = [p.grad for p in model.parameters()]
    again = hl.replay(fault.folder, model)
    assert again.reproduced
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Conv1d(2, 3, 1, padding=1, stride=2),
        nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4)), nn.Embedding(3, 4),
        nn.Softmax(dim=-1), nn.Dropout(0.2), nn.GroupNorm(2, 4),
        nn.MultiheadAttention(4, 2, batch_first=True), nn.LSTM(4, 3, num_layers=2),
        nn.CosineSimilarity(), nn.AvgPool2d((2, 3)), Giving(torch.log),
    ],
    ids=lambda layer: type(layer).__name__,
)  # fmt: skip
def test_modules_of_torch_are_described_by_their_constructor_or_not_at_all(layer):
    spelled = constructor_of(layer, ArgumentWriter())
    if isinstance(layer, (nn.Sequential, Giving)):
        assert spelled is None
        return
    assert spelled is not None
    made = type(layer)(**{name: read_value(value, {}) for name, value in spelled.items()})
    assert repr(made) == repr(layer)
    assert made.state_dict().keys() == layer.state_dict().keys()


def test_what_a_module_makes_is_replayed_with_the_state_that_it_had(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    nn.init.constant_(model[1].weight, 3e38)
    x = torch.randn(8, 4) * 10
    fault = fault_of(model, x, to=tmp_path)
    assert fault.path == "1"
    first = hl.replay(fault.folder)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)  # as training would
    state = {name: value.clone() for name, value in model.state_dict().items()}
    again = hl.replay(fault.folder, model)
    assert first.reproduced
    assert again.reproduced
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])


def test_a_module_without_operations_is_rebuilt_or_asked_for(tmp_path):
    class Strange(nn.Module):
        """Its numbers come from outside torch."""

        def forward(self, x):
            made = x.detach().numpy().copy()
            made[0] = math.nan
            return torch.from_numpy(made)

    model = nn.Sequential(nn.Identity(), Strange())
    fault = fault_of(model, torch.ones(3), to=tmp_path)
    assert (fault.kind, fault.place) == ("module", "1")
    with pytest.raises(hl.ReplayError, match=r"Give the model: hookline\.replay"):
        hl.replay(fault.folder)
    assert hl.replay(fault.folder, model).reproduced


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + torch.tensor(math.nan),
        lambda x: torch.var_mean(x.cumsum(1) * 1e30, dim=[np.int64(1)])[0],
    ],
)
def test_a_module_is_run_where_its_operation_could_not_be_written(function, tmp_path):
    model = nn.Sequential(nn.Identity(), Giving(function))
    fault = fault_of(model, torch.ones(2, 4), to=tmp_path)
    assert fault.kind == "operation"
    with pytest.raises(hl.ReplayError, match=r"Give the model: hookline\.replay"):
        hl.replay(fault.folder)
    again = hl.replay(fault.folder, model)
    assert (again.reproduced, again.exact) == (True, None)  # its own result was not written


def test_where_every_module_is_checked_the_module_is_written(tmp_path):
    model = nn.Sequential(nn.ReLU(), nn.LayerNorm(4, eps=0.0), nn.Identity())
    fault = fault_of(model, torch.ones(2, 4), to=tmp_path, careful=True)
    assert (fault.kind, fault.place) == ("module", "1")
    replayed = hl.replay(fault.folder)
    assert (replayed.reproduced, replayed.exact) == (True, True)
    assert "the module '1' (LayerNorm)" in repr(replayed)


@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize("grows", [False, True])
def test_buffers_that_a_call_puts_others_in_place_of_are_written_as_they_were(
    grows, careful, tmp_path
):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(0 if grows else ()))

        def forward(self, x):
            self.seen = torch.cat([self.seen, torch.ones(1)]) if grows else self.seen + 1
            return x / (self.seen.sum() != 3)

    model = nn.Sequential(Counting())
    with hl.guard(model, to=tmp_path, careful=careful), pytest.raises(hl.NonFiniteError) as found:
        [model(torch.ones(2)) for _ in range(4)]
    assert model[0].seen.sum() == 3
    replayed = hl.replay(found.value.fault.folder, model)
    assert replayed.reproduced
    assert model[0].seen.sum() == 3


class ReturnsSeveral(nn.Module):
    """Returns several values, of which one is bad, or what is made of a bad one."""

    def __init__(self, inside):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.identity, self.inside = nn.Identity(), inside

    def forward(self, x):
        if self.inside:
            return x, [self.identity(x / 0) + 1]
        padding = torch.ones(x.shape[:2], dtype=torch.bool)
        return self.attention(x, x, x, key_padding_mask=padding)


@pytest.mark.parametrize("inside", [False, True])
def test_where_every_module_is_checked_one_that_returns_several_values_is_replayed(
    inside, tmp_path
):
    model = ReturnsSeveral(inside)
    fault = fault_of(model, torch.randn(2, 3, 4), to=tmp_path, careful=True)
    assert fault.place == ("" if inside else "attention")
    replayed = hl.replay(fault.folder, model)
    assert (replayed.reproduced, replayed.exact) == (True, True)
    if not inside:
        assert hl.replay(fault.folder).exact


def test_the_files_are_plain_and_hold_no_code(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), Giving(lambda x: x.log()))
    nn.init.zeros_(model[0].weight), nn.init.zeros_(model[0].bias)
    fault = fault_of(model, torch.ones(2, 4), to=tmp_path)
    content = json.loads((fault.folder / "guard.json").read_text())
    tensors = load_file(fault.folder / "guard.safetensors")
    assert content["operation"]["function"] == "torch.Tensor.log"
    assert content["fault"]["place"] == "1/log"
    assert content["fault"]["values"][0][1]["negative"] == 8
    name = content["operation"]["args"][0]["tensor"]
    assert torch.equal(tensors[name], torch.zeros(2, 4))
    assert content["module"]["path"] == "1"


def test_where_no_dump_can_be_written_it_is_said_why(tmp_path):
    calls = iter(range(2))  # the first run and the search, and then no more
    model = nn.Sequential(nn.Linear(4, 4), Giving(lambda x: x / (0 * next(calls))))
    fault = fault_of(model, torch.ones(4), to=tmp_path)
    assert (fault.place, fault.folder) == ("1/div", None)
    assert "No dump was written: the second run raised StopIteration" in str(fault)
    model = nn.Sequential(nn.Linear(4, 4), Giving(lambda x: (x * 0).sqrt()))
    fault = fault_of(model, torch.ones(4), to=tmp_path, backward=True, careful=True)
    assert "No dump was written: what the producer was given is not known." in str(fault)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_not_written_and_the_rest_is(tmp_path):
    model = Giving(lambda x: torch.nested.as_nested_tensor([x, x]) / 0)
    fault = fault_of(model, torch.ones(2), to=tmp_path)
    with pytest.raises(hl.ReplayError, match="given a nested tensor"):
        hl.replay(fault.folder)
    assert hl.replay(fault.folder, model).reproduced


def test_dumps_do_not_overwrite_one_another_and_none_is_written_if_told_so(tmp_path):
    model = Giving(torch.log)
    one, two = (fault_of(model, torch.zeros(3), to=tmp_path) for _ in range(2))
    assert one.folder != two.folder
    assert fault_of(model, torch.zeros(3), to=None).folder is None
    assert len(list(tmp_path.iterdir())) == 2


def test_a_dump_that_cannot_be_written_does_not_hide_the_fault(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    fault = fault_of(Giving(torch.log), torch.zeros(3), to=blocked)
    assert fault.place == "/log"
    assert fault.folder is None
    assert "could not be written" in fault.remarks[-1]


def test_a_disk_that_is_full_does_not_hide_the_fault(tmp_path, monkeypatch):
    def save_file(tensors, path):
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", save_file)
    fault = fault_of(Giving(torch.log), torch.zeros(3), to=tmp_path)
    assert "No space left on device" in fault.remarks[-1]


def test_half_precision_and_autocast_are_replayed(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4))
    nn.init.constant_(model[0].weight, 3e38)

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.full((2, 4), 1e3))

    with hl.guard(model, to=tmp_path), pytest.raises(hl.NonFiniteError) as found:
        run()
    again = hl.replay(found.value.fault.folder)
    assert (again.reproduced, again.exact) == (True, True)
    assert again.output.dtype == torch.bfloat16


class Casting(nn.Module):
    """Turns autocast on, or off, in its own forward."""

    def __init__(self, inner, enabled):
        super().__init__()
        self.inner, self.enabled = inner, enabled

    def forward(self, x):
        with torch.autocast("cpu", torch.float16, enabled=self.enabled):
            return self.inner(x).float()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("whole", [False, True])
def test_autocast_that_a_forward_turns_on_or_off_is_replayed(tmp_path, enabled, whole):
    model = nn.Sequential(Casting(nn.Linear(4, 4), enabled))
    nn.init.constant_(model[0].inner.weight, 3e4 if enabled else 3e38)
    with (
        hl.guard(model, to=tmp_path),
        torch.autocast("cpu", torch.bfloat16, enabled=not enabled),
        pytest.raises(hl.NonFiniteError) as found,
    ):
        model(torch.full((2, 4), 1.0))
    assert found.value.fault.place == "0.inner/linear"
    again = hl.replay(found.value.fault.folder, *[model][: int(whole)])
    assert again.reproduced
    assert again.output.dtype == (torch.float16 if enabled else torch.float32)


def test_a_replay_is_not_changed_by_the_autocast_around_it(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4))
    nn.init.constant_(model[0].weight, 3e38)
    fault = fault_of(model, torch.ones(2, 4), to=tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        again = hl.replay(fault.folder)
    assert (again.exact, again.output.dtype) == (True, torch.float32)


# -- what is read is not trusted ------------------------------------------------------------------


@pytest.fixture
def written(tmp_path):
    fault = fault_of(nn.Sequential(nn.ReLU(), Giving(torch.log)), -torch.ones(2, 4), to=tmp_path)
    return fault.folder


HOSTILE = {
    "no fault": lambda c: c.pop("fault"),
    "fault of another kind": lambda c: c.update(fault=3),
    "no settings": lambda c: c["operation"].pop("autocast"),
    "strange settings": lambda c: c["operation"].update(autocast=[["cpu", True, "load"]]),
    "no function": lambda c: c["operation"].update(function="os.system"),
    "a function that reads files": lambda c: c["operation"].update(function="torch.load"),
    "a function of a list": lambda c: c["operation"].update(function=["torch.log"]),
    "no tensor": lambda c: c["operation"].update(args=[{"tensor": "77"}]),
    "arguments of no kind": lambda c: c["operation"].update(args={"tuple": []}),
    "unknown value": lambda c: c["operation"].update(args=[{"pickle": "gA=="}]),
    "too many arguments": lambda c: c["operation"].update(args=c["operation"]["args"] * 9),
    "no random state": lambda c: c["operation"].update(random=None),
    "short random state": lambda c: c["operation"].update(random=c["operation"]["args"][0]),
    "deep": lambda c: c["operation"].update(args=json.loads("[" * 60 + "]" * 60)),
    "outputs of no kind": lambda c: c.update(output=5),
    "an output that is no part": lambda c: c["output"][0].__setitem__(0, ["nowhere"]),
    "an output that is no tensor": lambda c: c["output"][0].__setitem__(1, "text"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused(case, written):
    rewrite_json(written / "guard.json", HOSTILE[case])
    state = torch.get_rng_state()
    with pytest.raises(hl.ReplayError):
        hl.replay(written)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["module"].update(inputs=3),
        lambda c: c["module"].update(path="nowhere"),
        lambda c: c["module"].update(path=3),
        lambda c: c["module"].update({"class": "os.path"}),
        lambda c: c["module"].update(state={"weight": {"tensor": "0"}}),
        lambda c: c["module"].update(state=[1]),
        lambda c: c["module"].update(state={"0.weight": 1}, path=""),
        lambda c: c["module"].update(positional="one"),
        lambda c: c["module"].pop("positional"),
        lambda c: c["module"].update(training=3),
        lambda c: c.update(module=None),
    ],
)
def test_a_hostile_module_is_refused(change, written):
    rewrite_json(written / "guard.json", change)
    model = nn.Sequential(nn.Linear(4, 4), Giving(torch.log))
    modes = [module.training for module in model.modules()]
    with pytest.raises(hl.ReplayError):
        hl.replay(written, model)
    assert modes == [module.training for module in model.modules()]


def test_a_class_of_the_file_is_never_imported(written, tmp_path, monkeypatch):
    (tmp_path / "evil_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)

    def change(content):
        content["operation"] = None
        content["module"].update({"class": "evil_module.Linear", "constructor": {}})

    rewrite_json(written / "guard.json", change)
    with pytest.raises(hl.ReplayError):
        hl.replay(written)
    assert "evil_module" not in sys.modules


def test_missing_and_truncated_files_are_told_apart(written, tmp_path):
    with pytest.raises(hl.ReplayError, match=r"no file guard\.json.*written by hookline\.guard\."):
        hl.replay(tmp_path / "nothing")
    copy = tmp_path / "copy"
    shutil.copytree(written, copy)
    file = copy / "guard.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(hl.ReplayError, match="not the file that was written"):
        hl.replay(copy)
    file.unlink()
    with pytest.raises(hl.ReplayError, match="missing"):
        hl.replay(copy)


def test_another_model_is_refused(written):
    with pytest.raises(hl.ReplayError, match="no module '1'"):
        hl.replay(written, nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(hl.ReplayError, match="is a ReLU in this model"):
        hl.replay(written, nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_model_that_ties_its_weights_is_run_again(dtype, backward, tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = (nn.Linear(4, 4, dtype=dtype) for _ in range(2))
            self.last.weight = self.first.weight

        def forward(self, x):
            x = self.last(self.first(x)) * 0
            return x.sqrt().abs() if backward else x.log().abs()

    model = Tied()
    fault = fault_of(model, torch.ones(2, 4, dtype=dtype), to=tmp_path, backward=backward)
    assert fault.backward is backward
    replayed = hl.replay(fault.folder, model)
    assert replayed.reproduced
    if backward:
        assert torch.equal(*(replayed.gradients[f"{n}.weight"].isnan() for n in ("first", "last")))


@pytest.mark.parametrize("inside", [False, True])
def test_a_compiled_model_is_the_one_that_was_guarded(inside, tmp_path):
    bad = Giving(lambda x: x.log())
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), bad) if inside else bad, backend="eager")
    fault = fault_of(model, -torch.ones(2, 4), to=tmp_path)
    assert hl.replay(fault.folder, model).reproduced


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, "text", 2.5, INF, -INF, 1 + 2j, ..., slice(1, None, 2), [1, (2, 3)],
        {"a": {1: [None]}}, torch.float16, torch.channels_last, (), [],
    ],
)  # fmt: skip
def test_arguments_are_spelled_and_read_back(value):
    speller = ArgumentWriter()
    spelled = json.loads(json.dumps(speller.value(value), allow_nan=False))
    assert read_value(spelled, speller.tensors) == value


def test_what_cannot_be_spelled_is_named():
    for value, name in (
        (object(), "object"),
        ({1, 2}, "set"),
        (torch.zeros(2).to_sparse(), "sparse"),
    ):
        with pytest.raises(TypeError, match=name):
            ArgumentWriter().value(value)


def test_only_functions_of_torch_are_found_by_name():
    for function in (torch.log, torch.Tensor.div, F.softmax, torch.Tensor.__getitem__):
        assert function_named(name_of(function)) is function
    for name in (
        "torch.load",
        "torch.save",
        "torch.from_file",
        "os.system",
        "torch.Tensor.map_",
        3,
    ):
        assert function_named(name) is None
    assert name_of(Path) is None
