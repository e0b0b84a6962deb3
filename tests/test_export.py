"""Models that were traced, exported, scripted, quantised, parametrised, are lazy, or are called by
the transforms of torch.func: each works as with hooks written by hand, or is refused with a remedy
that works.
"""

import contextlib
import functools
import io
import warnings

import pytest
import torch
import torch.package
from oracles import (
    assert_clean,
    assert_clean_of_ours,
    assert_same_state,
    bits,
    by_hand,
    hooks_left,
    state_bits,
    weigh,
)
from torch import Tensor, fx, nn
from torch.ao import quantization
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vjp, vmap
from torch.nn.utils import parametrizations, parametrize

import hookline as hl
from hookline.values.nested import leaves


class BlockAndHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x) * 2 + 1)


def block_and_head() -> BlockAndHead:
    torch.manual_seed(0)
    return BlockAndHead()


X = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))


def assert_captures_equal_hooks(model: nn.Module, paths: list[str], run) -> None:
    expected = by_hand(model, run, paths, gradients=True).places
    assert len(expected) >= 2 * len(paths)
    places = [f"{path}:{port}" for path in paths for port in ("input", "output", "grad_output")]
    with hl.capture(model, *places, detach=True) as record:
        run(model)
    for place, values in expected.items():
        found = record.calls(place)
        assert len(found) == len(values)
        assert all(map(torch.equal, found, values)), place
    assert_clean(model)


def scaled_by_hand(model: nn.Module, path: str, factor: float, run):
    handle = model.get_submodule(path).register_forward_hook(lambda m, i, o: o * factor)
    found = run(model)
    handle.remove()
    return found


def output_of_a_step(model: nn.Module) -> Tensor:
    y = model(X)
    weigh(y).backward()
    return y


def output_and_gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    y = output_of_a_step(model)
    return [bits(y), *(bits(p.grad) for p in model.parameters())]


def assert_unchanged_by_captures(model: nn.Module) -> None:
    bare = output_and_gradients(model)
    with hl.capture(model, "**", "**:input", "**:grad_output", "**:grad_input", "**.weight:grad"):
        looked = output_and_gradients(model)
    assert all(map(torch.equal, looked, bare))
    assert_clean(model)


# -- fx and unflattened programs ------------------------------------------------------------------


def traced_by_fx() -> fx.GraphModule:
    return fx.symbolic_trace(block_and_head())


@functools.cache
def exported() -> torch.export.ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, while exporting
        return torch.export.export(block_and_head(), (X,))


def unflattened() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        return torch.export.unflatten(exported())


GRAPHS = {"fx": traced_by_fx, "unflattened": unflattened}
LAYERS = ["block.0", "block.1", "block.2", "head"]


@pytest.mark.parametrize("make", GRAPHS.values(), ids=GRAPHS.keys())
def test_a_graph_with_modules_is_captured_as_by_hand_and_as_the_model_was(make):
    assert_captures_equal_hooks(make(), LAYERS, output_of_a_step)
    assert_unchanged_by_captures(make())
    places = [f"{p}:{port}" for p in LAYERS for port in ("output", "grad_output", "grad_input")]
    places += ["block.0.weight:grad", "head.bias:grad", "block.2.weight"]
    model, graph = block_and_head(), make()
    for each in (model, graph):
        each.zero_grad()
    with hl.capture(model, *places, detach=True) as expected:
        output_of_a_step(model)
    with hl.capture(graph, *places, detach=True) as record:
        output_of_a_step(graph)
    assert record.places() == expected.places()
    for place in expected:
        torch.testing.assert_close(record[place], expected[place])


@pytest.mark.parametrize("make", GRAPHS.values(), ids=GRAPHS.keys())
def test_a_graph_with_modules_is_edited_as_the_model(make):
    for place in ("block.1", "head:input", "block.2:grad_output", "block.2:grad_input", "head.bias",
                  "block.0.weight:grad"):  # fmt: skip
        found = []
        for model in (block_and_head(), make()):
            before = state_bits(model)
            model.zero_grad()
            with hl.edit(model, place, hl.scale(3.0)):
                y = output_of_a_step(model)
            found.append([y, *(p.grad for p in model.parameters())])
            assert_same_state(model, before)
            assert_clean(model)
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, msg=place)


@pytest.mark.parametrize("make", GRAPHS.values(), ids=GRAPHS.keys())
def test_a_forward_through_a_graph_can_be_ended_early(make):
    model = make()
    with hl.capture(model, "block.1", stop=True) as record:
        model(X)
        raise AssertionError("not reached")
    assert torch.equal(record["block.1"], block_and_head().block[:2](X))
    assert_clean(model)


def test_a_module_that_fx_keeps_as_a_name_only_is_refused():
    model = traced_by_fx()
    with pytest.raises(hl.NotHookable, match=r"no forward of its own.*Name its children"):
        hl.select(model, "block")
    assert hl.select(model, "block.*") == ["block.0", "block.1", "block.2"]  # the remedy
    assert hl.select(model, "**") == LAYERS


# -- exported programs ----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["block.0", "block", "head:input", "head:grad_output", "block.2"])
def test_a_module_in_an_exported_program_is_refused_and_the_remedy_works(where):
    model = exported().module()
    with pytest.raises(hl.NotHookable, match=r"calls operations only.*torch\.export\.unflatten\("):
        hl.select(model, where)
    for remedy in (unflattened(), block_and_head()):
        with hl.capture(remedy, where) as record:
            output_of_a_step(remedy)
        assert record[where] is not None


@pytest.mark.parametrize("where", ["**", "*", "block.*"])
def test_wildcards_find_nothing_in_an_exported_program_and_say_why(where):
    with pytest.raises(hl.PlaceNotFound, match="calls operations only"):
        hl.select(exported().module(), where)


def test_an_exported_program_in_a_model_is_one_module_and_the_record_says_so():
    model = nn.Sequential(nn.Linear(3, 3), exported().module())
    with hl.capture(model, "**", "1:input") as record:
        y = model(X)
    assert record.places() == ["0", "1", "1:input"]
    assert torch.equal(record["1"], y)
    assert torch.equal(record["1:input"], record["0"])
    assert "calls operations only" in record.unfired()["1.block.0"]
    assert not hl.attached(model)


def test_an_exported_program_has_its_own_ports_and_its_parameters_gradients():
    model = exported().module()
    model.zero_grad()
    with hl.capture(model, "", ":input", ":grad_output", "block.0.weight:grad") as record:
        y = output_of_a_step(model)
    assert record[""] is y
    assert torch.equal(record[":input"], X)
    assert torch.equal(record["block.0.weight:grad"], model.block.get_submodule("0").weight.grad)
    before = model(X)
    with hl.edit(model, "head.weight", hl.zero()):
        assert torch.equal(model(X), model.head.bias.expand(5, 2))
    assert torch.equal(model(X), before)


# -- ScriptModules --------------------------------------------------------------------------------


def scripted_net(how: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if how == "script":
            return torch.jit.script(block_and_head())
        return torch.jit.trace(block_and_head(), X)


HOW = ["script", "trace"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("where", ["", "block.0", "head:input", ":grad_output"])
def test_a_script_module_is_refused_at_every_level_and_the_remedy_works(how, where):
    model, around = scripted_net(how), nn.Sequential(nn.Identity(), scripted_net(how))
    inside = f"1.{where}" if where[:1].isalpha() else f"1{where}"
    for each, place in ((model, where), (around, inside)):
        for verb in (hl.capture(each, place), hl.edit(each, place, hl.zero())):
            with pytest.raises(hl.NotHookable, match=r"ScriptModule.*before torch\.jit\.script"):
                verb.__enter__()
        assert_clean_script(each)
    plain = block_and_head()
    with hl.capture(plain, where) as record:
        output_of_a_step(plain)
    assert record[where] is not None


def assert_clean_script(model: nn.Module) -> None:
    for _, module in model.named_modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("how", HOW)
def test_the_parameters_of_a_script_module_have_gradients_and_can_be_edited(how):
    model, reference = scripted_net(how), block_and_head()
    with hl.capture(model, "**:grad") as record:
        output_of_a_step(model)
    output_of_a_step(reference)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(record[f"{name}:grad"], parameter.grad)
    before = model(X)
    for each in (model, reference):
        each.zero_grad()
        with hl.edit(each, {"head.weight:grad": hl.scale(3.0), "block.0.weight": hl.zero()}):
            output_of_a_step(each)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert torch.equal(model(X), before)
    assert_clean_script(model)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("inside", [False, True])
def test_what_a_script_module_uses_at_a_call_cannot_be_seen_and_the_remedy_works(how, inside):
    model = nn.Sequential(scripted_net(how)) if inside else scripted_net(how)
    place = "0.head.weight" if inside else "head.weight"
    for verb in (hl.capture(model, place), hl.hook(model, place, print)):
        with pytest.raises(hl.NotHookable, match=r"calls cannot be seen.*hookline\.get_parameter"):
            verb.__enter__()
    assert torch.equal(hl.get_parameter(model, place), block_and_head().head.weight)
    with pytest.raises(hl.PlaceNotFound, match=r"head\.weight, .*head\.bias"):
        hl.get_parameter(model, place.removesuffix(".weight"))
    assert_clean_script(model)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("where", ["0.weight", "nothing"])
def test_a_frozen_script_module_has_no_parameters_and_says_so(where):
    frozen = torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Linear(3, 2)).eval()))
    with pytest.raises(hl.PlaceNotFound, match="Its own children: none"):
        hl.edit(frozen, where, hl.zero()).__enter__()


@pytest.mark.parametrize("how", HOW)
def test_the_parameters_of_a_script_module_are_preserved(how):
    model = scripted_net(how)
    before = state_bits(model)
    with hl.preserve(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
        assert model(X).max() > 7
    assert_same_state(model, before)


# -- a part of a model that is scripted, traced, frozen, exported or packaged ----------------------


class Normed(nn.Module):
    """Norms by the batch, which changes buffers, and then applies a function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.name == "log":
            x = torch.log(x)
        elif self.name == "sqrt":
            x = torch.sqrt(x * 0)
        return x


def packaged(part: nn.Module) -> nn.Module:
    """What torch.package gives back."""
    file = io.BytesIO()
    with torch.package.PackageExporter(file) as exporter:
        exporter.extern("**")
        exporter.save_pickle("part", "part.pkl", part)
    file.seek(0)
    return torch.package.PackageImporter(file).load_pickle("part", "part.pkl")


PARTS = {
    "script": torch.jit.script,
    "trace": lambda part: torch.jit.trace(part, X),
    "frozen": lambda part: torch.jit.freeze(torch.jit.script(part.eval())),
    "exported": lambda part: torch.export.export(part, (X,)).module(),
    "unflattened": lambda part: torch.export.unflatten(torch.export.export(part, (X,))),
    "fx": fx.symbolic_trace,
    "packaged": packaged,
}
each_part = pytest.mark.parametrize("how", PARTS)
each_script = pytest.mark.parametrize("how", ["script", "trace", "frozen"])


def holding(how: str, name: str = "nothing") -> nn.Sequential:
    """Linear, the part, Linear: 3 → 3 → 2."""
    torch.manual_seed(0)
    part = Normed(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        return nn.Sequential(nn.Linear(3, 3), PARTS[how](part), nn.Linear(3, 2))


def states(model: nn.Module) -> list[Tensor]:
    return [bits(t) for t in (*model.parameters(), *model.buffers())]


def descended(model: nn.Module, around) -> list[Tensor]:
    """Three steps of gradient descent, and what the model is afterwards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with around:
        for _ in range(3):
            found.append(bits(output_of_a_step(model)))
            optimizer.step()
            optimizer.zero_grad()
    return [*found, *states(model)]


@each_part
@pytest.mark.parametrize("careful", [False, True])
def test_a_guarded_training_of_a_model_with_such_a_part_is_the_bare_one(how, careful):
    bare = descended(holding(how), contextlib.nullcontext())
    model = holding(how)
    left = hooks_left(model)  # an exported program has one of torch's own
    found = descended(model, hl.guard(model, to=None, careful=careful))
    assert all(map(torch.equal, found, bare))
    assert hooks_left(model) == left


@each_part
@pytest.mark.parametrize("careful", [False, True])
def test_a_guard_names_such_a_part_that_makes_a_nan(how, careful, tmp_path):
    model, once = holding(how, "log"), holding(how, "log")
    left = hooks_left(model)
    once(X)
    with pytest.raises(hl.NonFiniteError) as caught:
        with hl.guard(model, to=tmp_path, careful=careful):
            model(X)
    fault = caught.value.fault
    assert (fault.path or fault.place).split(".")[0] == "1"
    assert not any(numbers.bad for _, numbers in fault.given)
    assert any(numbers.nan for _, numbers in fault.values)
    assert all(map(torch.equal, states(model), states(once)))  # it ran again, and was put back
    assert hooks_left(model) == left
    again = hl.replay(fault.folder, model)
    assert again.reproduced
    assert all(map(torch.equal, states(model), states(once)))


@each_script
@pytest.mark.parametrize("careful", [False, True])
def test_a_guard_names_a_script_module_whose_backward_makes_a_nan(how, careful, tmp_path):
    model = holding(how, "sqrt")
    with pytest.raises(hl.NonFiniteError) as caught:
        with hl.guard(model, to=tmp_path, careful=careful):
            output_of_a_step(model)
    fault = caught.value.fault
    assert (fault.path, fault.backward) == ("1", True)
    assert careful or hl.replay(fault.folder, model).reproduced


def test_an_input_of_a_script_module_is_named_as_in_its_forward():
    with pytest.raises(hl.NonFiniteError, match="given x "):
        with hl.guard(model := holding("script", "log"), to=None):
            model(X)


VERBS = {
    "select": lambda model, folder: hl.select(model, "**", inputs=X),
    "operations": lambda model, folder: hl.select(model, "**/*", inputs=X),
    "attached": lambda model, folder: hl.attached(model),
    "summarize": lambda model, folder: repr(hl.summarize(model, X, backward=True, time=True)),
    "compare": lambda model, folder: repr(hl.compare(model, nn.Sequential(*model), X)),
    "sweep": lambda model, folder: hl.sweep(model, X, X + 1, "**", torch.sum, progress=False),
    "measure": lambda model, folder: hl.measure(model, "**", statistics=hl.Mean(), data=[X, X]),
    "harvest": lambda model, folder: hl.harvest(
        model, [X, X], "**", to=folder / "store", ids=lambda batch: range(5), quiet=True
    ),
    "report": lambda model, folder: hl.report(model, folder / "a.html", batch=X, loss=torch.sum),
}


@each_part
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.filterwarnings("ignore:The model is in training mode", "ignore:Nothing happened")
def test_a_verb_runs_a_model_with_such_a_part_and_leaves_it_as_it_was(how, verb, tmp_path):
    model = holding(how)
    modes = [getattr(module, "training", None) for module in model.modules()]
    before, left = states(model), hooks_left(model)
    VERBS[verb](model, tmp_path)
    assert [getattr(module, "training", None) for module in model.modules()] == modes
    assert hooks_left(model) == left
    if verb not in ("measure", "harvest"):  # which run it as the program would
        assert all(map(torch.equal, states(model), before))


@each_part
def test_a_run_in_eval_mode_of_such_a_part_leaves_the_modes_as_they_were(how):
    model = holding(how)
    modes = [getattr(module, "training", None) for module in model.modules()]
    hl.summarize(model, X, mode="eval")
    assert [getattr(module, "training", None) for module in model.modules()] == modes


@each_script
def test_the_parameters_of_a_script_module_are_watched(how):
    model = holding(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.watch(model, "**:value", every=1, optimizer=optimizer) as watching:
        output_of_a_step(model)
        optimizer.step()
    own = ["1.norm.weight", "1.norm.bias"] if how != "frozen" else []
    expected = ["0.weight", "0.bias", *own, "2.weight", "2.bias"]
    for kind in ("weight", "weight_grad", "update"):
        assert [row.place for row in watching.last.rows if row.kind == kind] == expected


@pytest.mark.parametrize("how", HOW)
def test_a_module_in_a_script_module_cannot_be_replaced_and_the_remedies_work(how):
    model = nn.Sequential(scripted_net(how))
    before = model(X)
    with pytest.raises(hl.NotHookable, match=r"in a ScriptModule.*Replace the whole"):
        with hl.replace_module(model, "0.head", nn.Identity()):
            raise AssertionError("not reached")
    assert torch.equal(model(X), before)
    with hl.replace_module(model, "0", nn.Identity()):
        assert torch.equal(model(X), X)
    assert torch.equal(model(X), before)


# -- quantised models -----------------------------------------------------------------------------


class Stubbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant = quantization.QuantStub()
        self.conv = nn.Conv2d(1, 2, 1)
        self.relu = nn.ReLU()
        self.dequant = quantization.DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.relu(self.conv(self.quant(x))))


IMAGES = torch.randn(2, 1, 3, 3, generator=torch.Generator().manual_seed(2))


def quantised_by_torch(dynamic: bool) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: eager quantisation will move elsewhere
        if dynamic:
            return quantization.quantize_dynamic(block_and_head(), {nn.Linear}, dtype=torch.qint8)
        model = Stubbed().eval()
        model.qconfig = quantization.get_default_qconfig("x86")
        model = quantization.prepare(model)
        model(IMAGES)
        return quantization.convert(model)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_the_values_of_a_quantised_model_are_those_of_hooks_written_by_hand(dynamic, detach):
    model, x = quantised_by_torch(dynamic), X if dynamic else IMAGES
    paths = LAYERS if dynamic else ["quant", "conv", "relu", "dequant"]
    expected = by_hand(model, lambda model: model(x), paths).places
    bare = model(x)
    with hl.capture(model, "**", "**:input", detach=detach) as record:
        assert torch.equal(model(x), bare)
    assert dynamic or record["conv"].is_quantized
    for place, (value,) in expected.items():
        assert torch.equal(record[place], value), place
    assert_clean(model)


def test_an_edit_of_a_quantised_layer_does_what_a_hook_written_by_hand_does():
    model = quantised_by_torch(dynamic=True)
    expected = scaled_by_hand(model, "block.1", 0.5, lambda model: model(X))
    with hl.edit(model, "block.1", hl.scale(0.5)):
        assert torch.equal(model(X), expected)
    assert_clean(model)


def requantised(value: Tensor) -> Tensor:
    doubled = value.dequantize() * 2
    return torch.quantize_per_tensor(doubled, value.q_scale(), value.q_zero_point(), value.dtype)


@pytest.mark.parametrize(
    "change", [hl.scale(2.0), hl.zero(), hl.add(1.0), hl.replace(1.0), hl.noise(1.0)], ids=repr
)
def test_a_ready_change_of_a_quantised_value_is_refused_and_the_remedy_works(change):
    model = quantised_by_torch(dynamic=False)
    with pytest.raises(hl.ChangeError, match=r"The value is quantised.*quantises it again"):
        with hl.edit(model, "relu", change):
            model(IMAGES)
    handle = model.relu.register_forward_hook(lambda m, i, o: requantised(o))
    expected = model(IMAGES)
    handle.remove()
    with hl.edit(model, "relu", requantised):
        assert torch.equal(model(IMAGES), expected)
    assert_clean(model)


def test_the_packed_weight_of_a_quantised_layer_is_refused_and_the_remedy_works():
    model = quantised_by_torch(dynamic=True)
    with pytest.raises(hl.PlaceNotFound, match="'weight' is a method there") as caught:
        hl.select(model, "head.weight")
    remedy = str(caught.value).partition("Call ")[2].removesuffix(".")
    assert torch.equal(eval(remedy, {"hookline": hl, "model": model}), model.head.weight())


def test_a_quantised_layer_gives_no_gradient_and_says_so():
    model = quantised_by_torch(dynamic=True)
    with hl.capture(model, "head:grad_output") as record:
        model(X)
    with pytest.raises(hl.GradientNotAvailable, match="did not require grad"):
        record["head:grad_output"]


# -- lazy modules ---------------------------------------------------------------------------------


def lazy() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyBatchNorm1d(), nn.LazyLinear(2))


def ready() -> nn.Sequential:
    model = lazy()
    model(X)
    return model


EVERY_PORT = ["{}", "{}:input", "{}:inputs", "{}:grad_output", "{}:grad_input"]


@pytest.mark.parametrize("place", [*EVERY_PORT, "{}.weight", "{}.weight:grad", "**.bias:grad"])
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_a_lazy_module_is_captured_from_its_first_call_on(place, first):
    place = place.format("3")
    results = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = lazy() if first else ready()
        torch.manual_seed(1)  # for what is made at the first call
        if not captured:
            y = output_of_a_step(model)
        else:
            with hl.capture(model, place) as record:
                y = output_of_a_step(model)
            assert type(model[0]) is nn.Linear
        results.append([y, *(p.grad for p in model.parameters()), *model.parameters()])
    assert all(map(torch.equal, *results))
    if place.endswith(":grad"):
        for found in record:
            assert torch.equal(record[found], model.get_parameter(found.path).grad)
        assert len(record) == (3 if "*" in place else 1)
    else:
        assert record[place] is not None
    assert_clean(model)


@pytest.mark.parametrize("place", ["3", "3:input", "0:grad_output", "3.weight:grad"])
def test_a_lazy_module_is_edited_from_its_first_call_on(place):
    found = []
    for make in (lazy, ready):
        torch.manual_seed(0)
        model = make()
        if make is ready:
            model[2].reset_running_stats()
        torch.manual_seed(0)
        with hl.edit(model, place, hl.scale(3.0)):
            output_of_a_step(model)
        with torch.no_grad():
            reference = nn.Sequential(
                nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2)
            )
            for own, other in zip(reference.parameters(), model.parameters(), strict=True):
                own.copy_(other)
        with hl.edit(reference, place, hl.scale(3.0)):
            output_of_a_step(reference)
        found.append(
            [torch.equal(a.grad, b.grad)
             for a, b in zip(model.parameters(), reference.parameters(), strict=True)]
        )  # fmt: skip
        assert_clean(model)
    assert all(all(each) for each in found)


def test_the_value_of_a_lazy_parameter_cannot_be_edited_before_and_the_remedy_works():
    model = lazy()
    with pytest.raises(hl.NotHookable, match=r"it is lazy.*Run the model once"):
        with hl.edit(model, "0.weight", hl.zero()):
            model(X)
    assert_clean_of_ours(model)
    model(X)
    with hl.edit(model, "0.weight", hl.zero()):
        assert not model[0](X).sub(model[0].bias).any()
    assert_clean(model)


# -- parametrised weights -------------------------------------------------------------------------

KINDS = {
    "weight_norm": (parametrizations.weight_norm, ["original0", "original1"]),
    "spectral_norm": (parametrizations.spectral_norm, ["original"]),
    "orthogonal": (parametrizations.orthogonal, ["original"]),
}


def parametrised(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(KINDS[kind][0](nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 2)).eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("port", ["", ":value", ":grad"])
def test_a_parametrised_weight_is_refused_and_each_name_that_the_error_gives_works(kind, port):
    model = parametrised(kind)
    with pytest.raises(hl.PlaceNotFound, match=r"parametrised.*parametrizations\.weight") as caught:
        hl.select(model, f"0.weight{port}")
    for original in KINDS[kind][1]:
        assert f"'0.parametrizations.weight.{original}'" in str(caught.value)
    weight = model[0].weight.detach().clone()
    originals = [f"0.parametrizations.weight.{original}" for original in KINDS[kind][1]]
    with hl.capture(
        model, "0.parametrizations.weight", *originals, *(f"{o}:grad" for o in originals)
    ) as record:
        output_of_a_step(model)
    assert torch.equal(record["0.parametrizations.weight"], weight)
    for original in originals:
        parameter = model.get_parameter(original)
        assert torch.equal(record[original], parameter)
        assert torch.equal(record[f"{original}:grad"], parameter.grad)
    assert hooks_left(model) == hooks_left(parametrised(kind))  # torch has one of its own


@pytest.mark.parametrize("kind", KINDS)
def test_a_parametrised_weight_is_edited_where_it_is_computed(kind):
    model = parametrised(kind)
    before = model(X)
    run = lambda model: model(X)  # noqa: E731
    expected = scaled_by_hand(model, "0.parametrizations.weight", 3.0, run)
    with hl.edit(model, "0.parametrizations.weight", hl.scale(3.0)):
        assert torch.equal(model(X), expected)
    assert torch.equal(model(X), before)
    assert hooks_left(model) == hooks_left(parametrised(kind))


@pytest.mark.parametrize("place", ["", ".original0"])
def test_an_edit_reaches_a_weight_that_torch_has_cached_and_leaves_the_cache(place):
    model = parametrised("weight_norm")
    place = f"0.parametrizations.weight{place}"
    with hl.edit(model, place, hl.scale(3.0)):
        expected = model(X)
    with parametrize.cached():
        before = model(X)
        for _ in range(2):
            with hl.edit(model, place, hl.scale(3.0)):
                assert torch.equal(model(X), expected)
            assert torch.equal(model(X), before)
    assert not torch.equal(before, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_captures_change_nothing_in_a_parametrised_model(kind):
    bare = output_and_gradients(parametrised(kind).train())
    model = parametrised(kind).train()
    with hl.capture(model, "**", "**:input", "**:grad_output", "**:grad"):
        looked = output_and_gradients(model)
    assert all(map(torch.equal, looked, bare))


# -- attention and its fast path ------------------------------------------------------------------


def encoder(layers: int = 2) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers).eval()


TOKENS = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(3))
PADDING = torch.tensor([[False] * 3 + [True] * 2, [False] * 5])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mask", [None, PADDING], ids=["no mask", "padding"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize(
    "path", ["layers.0", "layers.1.linear1", "layers.0.self_attn", "layers.1.norm2"]
)
def test_an_encoder_gives_with_a_capture_what_it_gives_with_a_hook_written_by_hand(
    path, mode, mask
):
    model, seen = encoder(), []
    with mode():
        handle = model.get_submodule(path).register_forward_hook(lambda m, i, o: seen.append(o))
        expected = model(TOKENS, src_key_padding_mask=mask)
        handle.remove()
        with hl.capture(model, path) as record:
            found = model(TOKENS, src_key_padding_mask=mask)
    assert len(seen) == len(record.calls(path)) == 1
    assert torch.equal(found, expected)
    value = (seen[0][0], record[path][0]) if path.endswith("attn") else (seen[0], record[path])
    assert value[0].is_nested == value[1].is_nested
    if value[0].is_nested:
        assert all(map(torch.equal, value[0].unbind(), value[1].unbind()))
    else:
        assert torch.equal(*value)
    assert_clean(model)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("path", ["layers.0.linear1", "layers.1", "layers.0.self_attn.out_proj"])
def test_an_encoder_is_edited_in_eval_mode_or_the_reason_is_given(path):
    model = encoder()
    with torch.no_grad():
        if path.endswith("out_proj"):
            with pytest.raises(hl.NeverFired, match="uses the weights of its out_proj"):
                with hl.edit(model, path, hl.scale(0.5)):
                    model(TOKENS)
            with hl.edit(model, "layers.0.self_attn[0]", hl.zero()):  # the remedy
                assert not torch.equal(model(TOKENS), model.layers[1](TOKENS))
            return
        expected = scaled_by_hand(model, path, 0.5, lambda model: model(TOKENS))
        with hl.edit(model, path, hl.scale(0.5)):
            assert torch.equal(model(TOKENS), expected)
    assert_clean(model)


def test_the_weights_of_out_proj_have_gradients_and_can_be_edited():
    model = encoder(1).train()
    place = "layers.0.self_attn.out_proj.weight"
    with hl.capture(model, f"{place}:grad") as record:
        weigh(model(TOKENS)).backward()
    assert torch.equal(record[f"{place}:grad"], model.get_parameter(place).grad)
    bare = model(TOKENS)
    with hl.edit(model, place, hl.zero()):
        assert not torch.equal(model(TOKENS), bare)
    assert torch.equal(model(TOKENS), bare)


def test_the_value_of_out_proj_is_not_seen_at_a_call_and_the_reason_is_given():
    model = encoder(1)
    with pytest.raises(hl.NeverFired, match="uses the weights of its out_proj"):
        with hl.capture(model, "layers.0.self_attn.out_proj.weight"):
            model(TOKENS)


# -- torch.func -----------------------------------------------------------------------------------


def others(factor: float = 2.0, grad: bool = False) -> dict[str, Tensor]:
    """Other parameters than the model's own."""
    return {
        name: (parameter.detach() * factor).requires_grad_(grad)
        for name, parameter in block_and_head().named_parameters()
    }


def test_a_functional_call_is_captured_as_by_hand():
    given = others(grad=True)

    def run(model):
        weigh(functional_call(model, given, (X,))).backward()

    assert_captures_equal_hooks(block_and_head(), LAYERS, run)
    model = block_and_head()
    with hl.capture(model, "head.weight", "head:grad_input") as record:
        run(model)
    assert torch.equal(record["head.weight"], given["head.weight"])
    assert record["head:grad_input"].shape == (5, 4)


def test_a_functional_call_is_edited_as_by_hand():
    run = lambda model: functional_call(model, others(), (X,))  # noqa: E731
    model = block_and_head()
    expected = scaled_by_hand(model, "block.1", 0.5, run)
    with hl.edit(model, "block.1", hl.scale(0.5)):
        assert torch.equal(run(model), expected)
    assert_clean(model)


def test_an_edit_of_a_parameter_that_a_functional_call_replaces_is_an_error():
    model = block_and_head()
    with pytest.raises(hl.NeverFired, match=r"'head\.weight'.*another tensor in its stead"):
        with hl.edit(model, "head.weight", hl.zero()):
            functional_call(model, others(), (X,))
    with hl.edit(model, "head.weight", hl.zero()):  # not where the model's own is used as well
        functional_call(model, others(), (X,))
        model(X)
    with hl.edit(model, "head.weight", hl.zero()):  # nor where others are replaced
        functional_call(model, {"head.bias": torch.ones(2)}, (X,))
    assert_clean(model)


def test_the_gradients_of_parameters_that_are_given_are_not_the_models():
    model = block_and_head()
    with hl.capture(model, "head.weight:grad") as record:
        functional_call(model, others(grad=True), (X,)).sum().backward()
    with pytest.raises(hl.GradientNotAvailable, match="no gradient arrived"):
        record["head.weight:grad"]


TRANSFORMS = {
    "vmap": lambda model: vmap(model)(X),
    "grad": lambda model: grad(lambda x: weigh(model(x)))(X),
    "grad of parameters": lambda model: grad(
        lambda given: weigh(functional_call(model, given, (X,)))
    )(others())["block.0.weight"],
    "vmap of grad": lambda model: vmap(grad(lambda x: model(x).square().sum()))(X),
    "vjp": lambda model: vjp(model, X)[1](torch.ones(5, 2))[0],
    "jvp": lambda model: jvp(model, (X,), (torch.ones_like(X),))[1],
    "jacrev": lambda model: jacrev(model)(X[0]),
    "hessian": lambda model: hessian(lambda x: model(x).square().sum())(X[0]),
    "an ensemble": lambda model: vmap(
        lambda *state: functional_call(model, state, (X,)), in_dims=(0, 0)
    )(*stack_module_state([model, block_and_head()])),
}
each_transform = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())


@pytest.fixture(autouse=True)
def _quiet_jvp():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        yield


@each_transform
@pytest.mark.parametrize("detach", [False, True])
def test_a_transform_gives_the_same_with_captures_and_what_is_read_is_right_or_refused(
    transform, detach
):
    model = block_and_head()
    bare = transform(model)
    places = ["**", "**:input", "**:grad_output", "**:grad_input", "head.weight"]
    with hl.capture(model, *places, detach=detach) as record:
        assert torch.equal(transform(model), bare)
    repr(record)
    for place in record:
        if _readable(record, place):
            torch.stack([t for v in record.calls(place) for _, t in leaves(v)])  # alive
    assert_clean(model)


def _readable(record: hl.Record, place: str) -> bool:
    try:
        record.calls(place)
    except hl.ValueChanged as error:
        return "torch.func" not in str(error)
    return True


@each_transform
@pytest.mark.parametrize("path", ["head", "block.1", "block"])
def test_an_edit_inside_a_transform_does_what_a_hook_written_by_hand_does(transform, path):
    model = block_and_head()
    bare = transform(model)
    expected = scaled_by_hand(model, path, 0.5, transform)
    with hl.edit(model, path, hl.scale(0.5)):
        found = transform(model)
    assert torch.equal(found, expected)
    assert not torch.equal(found, bare)
    assert torch.equal(transform(model), bare)
    assert_clean(model)


@pytest.mark.parametrize("name", ["vmap", "grad", "vmap of grad", "jvp"])
def test_a_value_that_is_read_inside_a_transform_is_what_a_hook_written_by_hand_sees(name):
    model = block_and_head()

    def by_hook(x):
        seen = []
        handle = model.block.register_forward_hook(lambda m, i, o: seen.append(o))
        model(x)
        handle.remove()
        return seen[0]

    def by_capture(x):
        with hl.capture(model, "block") as record:
            model(x)
        return record["block"]

    apply = {
        "vmap": lambda f: vmap(f)(X),
        "grad": lambda f: grad(lambda x: weigh(f(x)))(X),
        "vmap of grad": lambda f: vmap(grad(lambda x: f(x).square().sum()))(X),
        "jvp": lambda f: jvp(f, (X,), (torch.ones_like(X),))[1],
    }[name]
    assert torch.equal(apply(by_capture), apply(by_hook))
    assert_clean(model)


def test_a_parameter_is_edited_inside_a_transform_by_attaching():
    model = block_and_head()
    weight = model.head.weight.detach().clone()
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        with hl.edit(model, "head.weight", hl.scale(3.0)):
            TRANSFORMS["grad"](model)
    handle = hl.edit(model, "head.weight", hl.scale(3.0)).attach()
    found = TRANSFORMS["grad"](model)
    handle.remove()
    assert torch.equal(model.head.weight, weight)
    with torch.no_grad():
        model.head.weight.mul_(3.0)
    assert torch.equal(found, TRANSFORMS["grad"](model))
