"""Places found in models: modules, parameters, aliases, wrappers, and what is not there."""

import ast
import copy
import pickle
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from models import Giving, named, small
from oracles import assert_clean, work_of
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel

import hookline as hl

X = torch.arange(6.0).reshape(2, 3) / 10


class EveryKindOfChild(nn.Module):
    """A convolution, a norm, a list of layers and a dict of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 1, bias=False)
        self.bn = nn.BatchNorm1d(2)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.heads = nn.ModuleDict({"a/b": nn.Linear(3, 1), "0": nn.Linear(3, 1)})
        self.scales = nn.ParameterList([torch.ones(1), torch.full((1,), 2.0)])
        self.register_buffer("table", torch.zeros(3))
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn(self.conv(x.unsqueeze(1))).mean(1)
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = layer(x) * scale
        return self.heads["a/b"](x + self.table) + self.heads["0"](x)


# -- modules --------------------------------------------------------------------------------------


def test_places_come_once_and_in_model_order():
    net = EveryKindOfChild()
    asked = ["heads.0", nn.Linear, "conv", "bn:input", "bn", "layers.*"]
    assert hl.select(net, *asked) == [
        "conv", "bn:input", "bn", "layers.0", "layers.1", r"heads.a\/b", "heads.0",
    ]  # fmt: skip


def test_select_without_places_gives_every_module():
    net = EveryKindOfChild()
    assert hl.select(net) == hl.select(net, "**")


def test_a_wildcard_leaves_out_what_has_no_forward():
    net = EveryKindOfChild()
    assert hl.select(net, "*") == ["conv", "bn"]
    assert not {"layers", "heads", "scales"} & set(hl.select(net, "**"))
    assert hl.select(net, lambda name, module: True)[:2] == ["", "conv"]
    assert "layers" not in hl.select(net, re.compile("layers"))


@pytest.mark.parametrize("path", ["layers", "heads", "scales"])
def test_naming_a_container_is_an_immediate_error_with_the_reason(path):
    net = EveryKindOfChild()
    with pytest.raises(hl.NotHookable, match=f"'{path}'.*has no forward of its own") as caught:
        hl.select(net, path)
    assert "children" in caught.value.remedy
    with pytest.raises(hl.NotHookable, match="no forward of its own"):
        hl.select(net, net.get_submodule(path))


def test_a_container_with_a_forward_is_a_module_like_others():
    class Stack(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[0](x)

    assert hl.select(nn.Sequential(Stack([nn.ReLU()])), "*") == ["0"]


def test_a_forward_given_to_the_instance_counts():
    model = nn.Sequential(nn.Module())
    model[0].forward = lambda x: x * 2
    with hl.capture(model, "0", "*") as record:
        model(X)
    assert torch.equal(record["0"], X * 2)
    assert_clean(model)


def test_the_empty_path_is_the_model_itself():
    model = small()
    with hl.capture(model, "", ":input", model, (model, ":inputs")) as record:
        out = model(X)
    assert record.places() == ["", ":input", ":inputs"]
    assert record[""] is out is record[model]
    assert torch.equal(record[":input"], X)
    assert_clean(model)


def test_modules_types_expressions_predicates_pairs_and_lists_are_places():
    model = small()
    assert hl.select(model, model[2]) == ["2"]
    assert hl.select(model, nn.Linear) == ["0", "2"]
    assert hl.select(model, nn.Module) == ["", "0", "1", "2"]
    assert hl.select(model, re.compile("[12]")) == ["1", "2"]
    assert hl.select(model, lambda name, module: isinstance(module, nn.ReLU)) == ["1"]
    assert hl.select(model, (nn.Linear, ":grad_output")) == ["0:grad_output", "2:grad_output"]
    assert hl.select(model, (model[1], ":inputs[input]")) == ["1:inputs[input]"]
    assert hl.select(model, (re.compile("0"), ":input")) == ["0:input"]
    assert hl.select(model, ("*", ":input")) == ["0:input", "1:input", "2:input"]
    assert hl.select(model, (["0", nn.ReLU], ":input")) == ["0:input", "1:input"]
    assert hl.select(model, ["0", [model[1], ("2", ":input")]]) == ["0", "1", "2:input"]
    assert hl.select(model, ("0", "1")) == ["0", "1"]
    assert hl.select(model, (name for name in "02")) == ["0", "2"]


def test_the_part_of_a_pair_follows_the_parts_of_its_place():
    assert hl.select(small(), ("0:inputs[a]", "[0]")) == ["0:inputs[a][0]"]


def test_a_place_with_a_port_takes_no_second_one():
    with pytest.raises(hl.PlaceError, match="0:input"):
        hl.select(small(), ("0:input", ":grad_input"))


def test_the_exception_of_a_predicate_is_the_users():
    def fails(name, module):
        raise ZeroDivisionError(name)

    with pytest.raises(ZeroDivisionError):
        hl.select(small(), fails)


@pytest.mark.parametrize("where", [None, 3, 1.5, b"0", [None]])
def test_what_is_no_place_is_refused_with_what_would_be(where):
    with pytest.raises(
        hl.PlaceError, match=r"is no place: it is of type .* Give a string, a module"
    ):
        hl.select(small(), where)


@pytest.mark.parametrize("verb", ["capture", "hook", "edit"])
def test_an_empty_list_of_places_is_not_silently_nothing(verb):
    model = small()
    arguments = {"capture": (), "hook": (print,), "edit": (hl.zero(),)}[verb]
    with pytest.raises((hl.HooklineError, TypeError)), getattr(hl, verb)(model, [], *arguments):
        model(X)
    assert_clean(model)


def test_a_generator_of_places_serves_every_entering():
    model = small()
    context = hl.capture(model, (name for name in "02"))
    for _ in range(2):
        with context as record:
            model(X)
        assert record.places() == ["0", "2"]
    assert_clean(model)


# -- parameters and buffers -----------------------------------------------------------------------


def test_a_literal_last_segment_is_a_module_a_parameter_or_a_buffer():
    net = EveryKindOfChild()
    asked = ["conv.weight", "bn.running_mean", "table", "scales.1", "heads.a/b.bias"]
    assert hl.select(net, asked) == [
        "table", "conv.weight", "bn.running_mean", r"heads.a\/b.bias", "scales.1",
    ]  # fmt: skip
    assert hl.select(net, "**.bias") == [
        "bn.bias", "layers.0.bias", "layers.1.bias", r"heads.a\/b.bias", "heads.0.bias",
    ]  # fmt: skip


def test_a_wildcard_with_value_gives_parameters_and_buffers():
    net = EveryKindOfChild()
    every = {name for name, _ in [*net.named_parameters(), *net.named_buffers()]}
    assert "table" in every
    assert {place.path for place in hl.select(net, "**:value")} == every
    assert hl.select(net, "*:value") == ["table"]
    assert hl.select(net, "bn.*:value") == [
        "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var", "bn.num_batches_tracked",
    ]  # fmt: skip
    assert hl.select(net, "scales.*:value") == ["scales.0", "scales.1"]
    assert hl.select(net, "**.{weight,running_*}:value")[:2] == ["conv.weight", "bn.weight"]


def test_a_wildcard_with_grad_gives_parameters_only():
    net = EveryKindOfChild()
    found = {place.path for place in hl.select(net, "**:grad")}
    assert found == {name for name, _ in net.named_parameters()}


def test_a_wildcard_without_a_port_of_tensors_never_gives_tensors():
    net = EveryKindOfChild()
    for text in ("bn.*", "conv.**", "scales.*"):
        with pytest.raises(hl.PlaceNotFound, match=re.escape(f"Nothing matches '{text}'")):
            hl.select(net, text)


def test_a_captured_parameter_is_its_value_at_each_call():
    net = EveryKindOfChild().eval()
    with hl.capture(net, "table", "bn.running_mean", "heads.a/b.weight") as record, torch.no_grad():
        net(X)
        net.table += 1
        net(X)
    assert [value.tolist() for value in record.calls("table")] == [[0] * 3, [1] * 3]
    assert len(record.calls(r"heads.a\/b.weight")) == 2
    assert_clean(net)


def test_a_parameter_in_a_parameter_list_can_be_captured_and_edited():
    net = EveryKindOfChild().eval()
    with hl.capture(net, "scales.1") as record:
        plain = net(X)
    assert record["scales.1"].item() == 2.0
    with hl.edit(net, "scales.1", hl.zero()):
        edited = net(X)
    net.scales[1].data.zero_()
    assert torch.equal(edited, net(X))
    assert not torch.equal(edited, plain)
    assert_clean(net)


def test_a_module_port_at_a_parameter_and_the_other_way_round_are_told():
    model = small()
    with pytest.raises(
        hl.PlaceError, match=r"'0.weight:input'.*is a parameter or buffer.*value and"
    ):
        hl.select(model, "0.weight:input")
    with pytest.raises(hl.PlaceError, match=r"belongs to parameters and buffers.*value and :grad"):
        hl.select(model, (nn.Linear, ":grad"))
    with pytest.raises(hl.PlaceNotFound, match="No parameter or buffer matches '0:grad'"):
        hl.select(model, "0:grad")


@pytest.mark.parametrize(
    ("where", "inside"),
    [("0:grad", "0.**:grad"), ("*:value", "0.**:value"), (":grad", "**:grad")],
)
def test_parameters_that_are_asked_for_by_their_module_are_named(where, inside):
    model = small()
    with pytest.raises(hl.PlaceNotFound, match=rf"is a module; it holds '{re.escape(inside)}'"):
        hl.select(model, where)
    assert "0.weight" in str(hl.select(model, inside))


def test_a_parameter_that_is_none_is_told_from_one_that_does_not_exist():
    net = EveryKindOfChild()
    for path in ("conv.bias", "nothing", "conv.bias:grad"):
        with pytest.raises(hl.PlaceNotFound, match="is there, but it is None"):
            hl.select(net, path)


def test_a_child_that_is_none_is_told_from_one_that_does_not_exist():
    model = named("a")
    model.register_module("down", None)
    assert hl.select(model, "**") == ["a"]
    with pytest.raises(hl.PlaceNotFound, match=r"'down'.*None"):
        hl.select(model, "down")


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + weight.T


def test_a_parametrised_weight_is_refused_with_the_names_to_use():
    model = nn.Sequential(nn.Linear(3, 3))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    with pytest.raises(hl.PlaceNotFound, match="'weight' is parametrised") as caught:
        hl.select(model, "0.weight")
    suggested = re.findall(r"'([^']+)'", caught.value.remedy)
    assert suggested == ["0.parametrizations.weight", "0.parametrizations.weight.original"]
    with hl.capture(model, *suggested) as record:
        model(X)
    original = model[0].parametrizations.weight.original
    assert torch.equal(record[suggested[0]], original + original.T)
    assert record[suggested[1]] is original
    with hl.edit(model, suggested[0], hl.zero()):
        assert torch.equal(model(X), model[0].bias.expand(2, 3))
    assert_clean(model)


def test_every_name_that_the_error_of_a_weight_norm_gives_exists():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)))
    with pytest.raises(hl.PlaceNotFound, match="parametrised") as caught:
        hl.select(model, "0.weight:grad")
    for name in re.findall(r"'([^']+)'", caught.value.remedy):
        assert hl.select(model, name)


# -- plain tensors --------------------------------------------------------------------------------


def test_a_plain_tensor_stands_for_the_model_with_grad():
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    with hl.capture(y, ":grad") as record, hl.edit(y, [":grad"], hl.scale(5.0)):
        (y * 3).sum().backward()
    assert torch.equal(record[":grad"], torch.full((3,), 3.0))
    assert torch.equal(x.grad, torch.full((3,), 30.0))
    assert hl.select(y, ":grad") == [":grad"]


@pytest.mark.parametrize("where", ["", ":input", "fc", nn.Linear, ":value"])
def test_a_plain_tensor_has_no_other_place(where):
    with pytest.raises(hl.PlaceError, match=r"a tensor has one place.*':grad'"):
        hl.capture(torch.ones(1, requires_grad=True), where).attach()


# -- aliases --------------------------------------------------------------------------------------


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first
        self.box = nn.Sequential(self.first, nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.box(x) + self.again(x)


@pytest.mark.parametrize("alias", ["again", "box.0", "aga*", "box.*"])
def test_every_alias_resolves_to_the_first_name(alias):
    model = Aliased()
    assert hl.select(model, alias)[0] == "first"
    assert hl.select(model, "again.weight:grad", "box.0.bias") == [
        "first.weight:grad",
        "first.bias",
    ]


def test_a_module_with_three_names_has_one_place_that_all_of_them_read():
    model = Aliased()
    with hl.capture(model, "box.0", "again:input", "again.bias") as record:
        model(X)
    assert record.places() == ["first", "first:input", "first.bias"]
    for name in ("first", "again", "box.0", model.first):
        assert [value.shape for value in record.calls(name)] == [(2, 3), (2, 3)]
    assert record["first:input", 0] is record["box.0:input", 0]
    assert record["first.bias", 1] is record["again.bias", 1] is model.first.bias
    assert_clean(model)


def test_a_model_that_holds_itself_is_walked_once():
    model = small()
    model[1].whole = model
    assert hl.select(model, "**") == ["0", "1", "2"]
    assert hl.select(model, "1.whole.1.whole.2") == ["2"]
    assert hl.select(model, "1.whole") == [""]


# -- wrappers -------------------------------------------------------------------------------------


class ModuleWrapper(nn.Module):
    """As DistributedDataParallel, torch.compile and others name what they wrap."""

    def __init__(self, inner: nn.Module, name: str = "module") -> None:
        super().__init__()
        self.add_module(name, inner)

    def forward(self, *args: object) -> object:
        return next(self.children())(*args)


def deep() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 2))


@pytest.mark.parametrize("names", [["module"], ["_orig_mod"], ["module", "_orig_mod"]])
@pytest.mark.parametrize(
    "text",
    [
        "0", "0.0", "*", "0.*", "*.0", "*.*", "{0,1}", "0.0:input", "1.weight", "0.0.weight:grad",
        "**.weight:value", "*.weight:value", "0.*.weight:grad", "**.bias", "[0-9]",
        "1:grad_output[0]",
    ],
)  # fmt: skip
def test_the_name_of_a_wrapper_may_be_left_out(names, text):
    model = deep()
    where = re.compile(text + "$") if text == "[0-9]" else text
    expected = hl.select(model, where)
    prefix = ""
    for name in names:
        model, prefix = ModuleWrapper(model, name), f"{name}.{prefix}"
    assert hl.select(model, where) == [prefix + place for place in expected]
    if isinstance(where, str):
        assert hl.select(model, prefix + where) == [prefix + place for place in expected]


def test_a_compiled_model_is_a_wrapper():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, on importing dynamo
        model = torch.compile(deep())
    assert hl.select(model, "0.*", "1.weight") == [
        "_orig_mod.0.0", "_orig_mod.0.1", "_orig_mod.1.weight",
    ]  # fmt: skip


def test_a_child_called_module_inside_a_model_is_a_child_like_others():
    model = nn.Sequential(ModuleWrapper(nn.Linear(3, 3)), ModuleWrapper(deep()))
    assert hl.select(model, "0.*") == ["0.module"]
    assert hl.select(model, "*.*") == ["0.module", "1.module"]
    assert hl.select(model, "*.mod*") == ["0.module", "1.module"]
    assert hl.select(model, "1.0.0", "0.weight") == ["0.module.weight", "1.module.0.0"]


def test_a_wrapper_keeps_its_own_parameters_and_buffers():
    model = AveragedModel(nn.Linear(3, 2))
    assert hl.select(model, "n_averaged") == ["n_averaged"]
    assert hl.select(model, "weight") == ["module.weight"]
    everything = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    assert sorted(hl.select(model, "**:value")) == sorted(everything)
    model.register_buffer("weight", torch.zeros(1))
    for place in hl.select(model, "**:value"):
        assert hl.select(model, place) == [place]


def test_a_place_captured_through_a_wrapper_is_read_with_and_without_its_name():
    model = ModuleWrapper(deep())
    with hl.capture(model, "0.0", "1:input", "1.weight") as record:
        model(X)
    assert record.places() == ["module.0.0", "module.1:input", "module.1.weight"]
    for name in ("0.0", "1.weight", "1:input"):
        assert record[name] is record["module." + name]
    assert_clean(model)


# -- ScriptModules --------------------------------------------------------------------------------


def with_scripted_child() -> nn.Sequential:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        inner = torch.jit.script(nn.Sequential(nn.Linear(3, 3)))
    return nn.Sequential(nn.Linear(3, 3), inner, nn.ReLU())


@pytest.mark.parametrize("where", ["1", "1.0", "1:input", "1.0:grad_output"])
def test_a_script_module_is_refused_with_the_reason(where):
    with pytest.raises(hl.NotHookable, match=r"it is a ScriptModule.*before torch.jit.script"):
        hl.select(with_scripted_child(), where)


def test_wildcards_pass_over_script_modules_and_the_record_says_so():
    model = with_scripted_child()
    with hl.capture(model, "**") as record:
        model(X)
    assert record.places() == ["0", "2"]
    assert {place: "ScriptModule" in why for place, why in record.unfired().items()} == {
        "1": True,
        "1.0": True,
    }
    with pytest.raises(hl.PlaceNotFound, match="ScriptModule"):
        hl.select(model, "1.*")
    assert_clean(model[0], model[2])


def test_a_name_that_a_script_module_does_not_have_is_not_found():
    with pytest.raises(hl.PlaceNotFound, match=r"'1.nope'.*Closest|'1.nope'.*children"):
        hl.select(with_scripted_child(), "1.nope")


def test_the_parameters_of_script_modules_are_places():
    model = with_scripted_child()
    assert hl.select(model, "**.weight:value") == ["0.weight", "1.0.weight"]
    with hl.capture(model, "**:grad", "1.0.weight:grad") as record:
        model(X).sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert expected.keys() == {place.path for place in record.places()}
    for place in record.places():
        assert torch.equal(record[place], expected[place.path])


# -- what is not there ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "closest"),
    [("layer.0", "layers.0"), ("con", "conv"), ("bn.runing_mean", "bn.running_mean"),
     ("heads.a/c:input", r"heads.a\\/b"), ("conv.wieght:grad", "conv.weight"), ("tabel", "table")],
)  # fmt: skip
def test_a_typo_is_told_with_the_closest_names(text, closest):
    with pytest.raises(hl.PlaceNotFound) as caught:
        hl.select(EveryKindOfChild(), text)
    assert repr(text) in caught.value.asked
    assert caught.value.found.startswith("Closest: ")
    assert f"'{closest}'" in caught.value.found
    assert "hookline.select(model, '**" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "closest"),
    [
        ("h.0", "transformer.h.0"),  # the beginning was left out
        ("h.1.0:input", "transformer.h.1.0"),
        ("0.bias", "transformer.h.0.bias"),
        ("h.*", "**.h.*"),
        ("h.{0,1}:grad_output", "**.h.{0,1}:grad_output"),
        ("transformer.h.0.output", "transformer.h.0:output"),  # a port after a dot
        ("transformer.h.1.input[0]", "transformer.h.1:input"),
        ("transformer.h.0.bias.grad", "transformer.h.0.bias:grad"),
        ("output", ":output"),
    ],
)
def test_a_path_without_its_beginning_or_a_port_after_a_dot_is_told_as_it_is_spelled(text, closest):
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.ReLU())])
    model = nn.ModuleDict({"transformer": nn.ModuleDict({"h": layers})})
    with pytest.raises(hl.PlaceNotFound) as caught:
        hl.select(model, text)
    assert caught.value.found.startswith(f"Closest: {closest!r}")
    if closest != ":output":  # a ModuleDict has none
        assert hl.select(model, closest)


def test_where_nothing_could_be_hooked_further_down_that_is_not_the_advice():
    model = nn.ModuleDict({"l": nn.ModuleList([nn.ModuleList([nn.ReLU()])])})
    with pytest.raises(hl.PlaceNotFound) as caught:
        hl.select(model, "l.*")
    assert "**" not in caught.value.found


def test_the_children_to_name_in_place_of_a_container_are_its_own():
    model = nn.ModuleDict(
        {"h": nn.ModuleList([nn.ReLU()]), "a/b": nn.ParameterList([torch.ones(1)])}
    )
    for text in ("h", "h[0]", r"a\/b"):
        with pytest.raises(hl.NotHookable) as caught:
            hl.select(model, text)
        named = re.fullmatch(
            r"Name its children, as in (.*), or give one of them as the model\.",
            caught.value.remedy,
        )
        assert len(hl.select(model, ast.literal_eval(named[1]))) == 1


def test_a_model_without_children_is_not_to_be_listed_by_a_pattern_that_it_has_not():
    with pytest.raises(hl.PlaceNotFound) as caught:
        hl.select(nn.ReLU(), "fc")
    assert "'**'" not in caught.value.remedy
    assert hl.select(nn.ReLU(), "", ":input") == ["", ":input"]  # what it names instead


@pytest.mark.parametrize("text", ["zzz", "zzz.*", "**.zzz", "{y,z}z", "zzz:grad", "**.zzz:value"])
def test_what_resembles_nothing_is_told_with_the_models_children(text):
    with pytest.raises(hl.PlaceNotFound, match=re.escape(repr(text))) as caught:
        hl.select(EveryKindOfChild(), text)
    assert "'conv'" in caught.value.found
    assert "hookline.select(model, '**" in caught.value.remedy


def test_a_type_or_predicate_without_a_match_is_told_with_the_types_there_are():
    net = EveryKindOfChild()
    with pytest.raises(
        hl.PlaceNotFound, match=r"matches Conv2d. The model has .*BatchNorm1d, Conv1d"
    ):
        hl.select(net, nn.Conv2d)
    with pytest.raises(hl.PlaceNotFound, match=r"'nothing\$'"):
        hl.select(net, re.compile("nothing$"))
    with pytest.raises(hl.PlaceNotFound, match=r"matches Tensor. The model has"):
        hl.select(net, torch.Tensor)


def test_a_type_that_modules_have_besides_is_a_place():
    class Marked:
        pass

    class Layer(nn.Linear, Marked):
        pass

    assert hl.select(nn.Sequential(nn.Linear(1, 1), Layer(1, 1)), Marked) == ["1"]


def test_a_module_of_another_model_is_refused():
    with pytest.raises(hl.PlaceNotFound, match=r"Nothing matches the given Linear.*plain list"):
        hl.select(small(), nn.Linear(1, 1))


def test_a_model_without_children_has_an_error_too():
    with pytest.raises(hl.PlaceNotFound, match="none"):
        hl.select(nn.Linear(1, 1, bias=False), "zzz")


def test_what_is_no_model_is_refused():
    for verb in (lambda: hl.capture("model", "0"), lambda: hl.hook(None, "0", print)):
        with pytest.raises(TypeError, match=r"A model is a torch.nn.Module"):
            verb()


# -- Place ----------------------------------------------------------------------------------------


def test_a_place_is_a_string_with_its_pieces():
    (place,) = hl.select(named("x[0]"), r"x\[0\]:inputs[mask]['0']")
    assert isinstance(place, str)
    assert (place.path, place.port, place.parts) == ("x[0]", "inputs", ("mask", "0"))
    assert {place: 1}[r"x\[0\]:inputs[mask]['0']"] == 1


def test_a_place_survives_copying_and_pickling():
    (place,) = hl.select(small(), "0:inputs[input]")
    for twin in (copy.copy(place), copy.deepcopy(place), pickle.loads(pickle.dumps(place))):
        assert type(twin) is hl.Place
        assert (twin, twin.path, twin.port, twin.parts) == (place, "0", "inputs", ("input",))


# -- many and deep --------------------------------------------------------------------------------


def of_modules(count: int) -> nn.Sequential:
    block = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Identity(), nn.Identity())
    return nn.Sequential(*[copy.deepcopy(block) for _ in range(count // 5)])


@pytest.mark.parametrize(
    "where",
    [
        lambda model: ["**"],
        lambda model: ["**.weight:grad"],
        lambda model: ["**.0.**", "*.{0,1}"],
        lambda model: [nn.Linear],
        lambda model: [re.compile("1$")],
        lambda model: [name for name, _ in model.named_modules() if name],
        lambda model: [
            f"{name}.bias:grad" for name, m in model.named_modules() if hasattr(m, "bias")
        ],
        lambda model: list(model.children()),
        lambda model: [(module, ":input") for module in model.modules()],
    ],
    ids=["all", "tensors", "globs", "type", "regex", "names", "tensor-names", "modules", "pairs"],
)
def test_the_steps_of_select_grow_with_the_modules_not_with_their_square(where):
    counts = []
    for size in (250, 1000):
        model = of_modules(size)
        asked = where(model)
        hl.select(model, *asked)  # the spellings are parsed once
        counts.append(work_of(lambda model=model, asked=asked: hl.select(model, *asked)))
    assert counts[1] < 5 * counts[0]
    assert counts[1] < 200 * 1000


def test_reading_a_record_takes_steps_that_grow_with_the_places():
    counts = []
    for size in (100, 400):
        model = of_modules(size)
        with hl.capture(model, "**") as record:
            model(torch.ones(1))
        modules = list(model.children())
        counts.append(
            work_of(lambda r=record, m=modules: [[r[module] for module in m], [*r.items()]])
        )
    assert counts[1] < 6 * counts[0]


def test_a_model_of_500_levels_is_no_trouble():
    model: nn.Module = nn.Linear(1, 1)
    for _ in range(500):
        model = nn.Sequential(model)
    bottom = ".".join(["0"] * 500)
    assert len(hl.select(model, "**")) == 500
    assert hl.select(model, "**.weight:value") == [bottom + ".weight"]
    assert hl.select(model, bottom, bottom + ".bias:grad") == [bottom, bottom + ".bias:grad"]
    assert hl.select(model, ".".join(["*"] * 500)) == [bottom]
    assert hl.select(model, nn.Linear) == [bottom]
    assert hl.get_module(model, bottom) is list(model.modules())[-1]
    with pytest.raises(hl.PlaceNotFound, match="zzz"):
        hl.select(model, "zzz")
    handle = hl.capture(model, "**").attach()
    assert hl.attached(model) == [handle]
    handle.remove()
    assert_clean(model)


def test_a_weight_used_without_its_module_is_told():
    lin = nn.Linear(3, 3)
    model = Giving(lambda x: F.linear(x, lin.weight))
    model.lin = lin
    with pytest.raises(hl.NeverFired, match=r"'lin'.*not called.*weights used without it"):
        with hl.capture(model, "lin"):
            model(X)
    assert_clean(model)


@pytest.mark.parametrize("where", ["0.weight[0]", "0.weight:grad[0]", "*.weight[1]"])
def test_a_part_of_a_parameter_is_refused(where):
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(hl.PlaceError, match="a part never indexes a tensor"):
        hl.select(model, where)


@pytest.mark.parametrize("place", ["gone.fc", "gone.inner.*", "gone.inner.**:input"])
def test_a_path_through_a_child_that_is_none_is_not_found(place):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model.add_module("gone", None)
    with pytest.raises(hl.PlaceNotFound, match="Nothing matches"), hl.capture(model, place):
        pass


def test_a_name_that_is_a_wildcard_is_seen_in_a_wrapper_whose_name_is_left_out():
    model = nn.Module()
    model.module = nn.Sequential()
    model.module.add_module("**", nn.ReLU())
    hl.select(model, nn.Module)  # the types are known
    with pytest.raises(hl.PlaceError, match="has two readings"), hl.capture(model, "**"):
        pass


class Squashed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, scale=1.0):
        return torch.tanh(self.linear(x)) * scale


@pytest.mark.parametrize(
    "wrap", [lambda model: torch.compile(model, backend="eager"), nn.DataParallel]
)
def test_the_model_itself_is_looked_for_inside_of_torchs_wrappers(wrap):
    model, x = Squashed(), torch.ones(2, 3)
    wrapped = wrap(model)
    with hl.capture(wrapped, ":inputs", ":inputs[scale]", ":input", "/tanh", "") as record:
        out = wrapped(x, scale=2.0)
    assert list(record[":inputs"]) == ["x", "scale"]
    assert record[":inputs[scale]"] == 2.0
    assert torch.equal(record[":input"], x)
    assert torch.equal(record["/tanh"] * 2, out)
    assert torch.equal(record[""], out)


@pytest.mark.parametrize("where", [lambda m: m.weight, lambda m: [m.weight], lambda m: b"weight"])
def test_a_tensor_or_bytes_in_the_place_of_a_name_are_refused_by_their_type(where):
    model = nn.Linear(2, 3)
    with pytest.raises(hl.PlaceError, match=r"is no place: it is of type (Parameter|bytes)"):
        hl.select(model, where(model))


@pytest.mark.parametrize("where", ["0:grad", "0:value", ("0", ":grad"), ":grad"])
def test_the_port_of_a_parameter_at_a_module_is_answered_with_those_of_modules(where):
    with pytest.raises(hl.PlaceNotFound, match=r"is a module; it holds .* has :grad_output"):
        hl.select(nn.Sequential(nn.Linear(2, 3)), where)


def test_a_module_without_parameters_is_not_said_to_hold_some():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    with pytest.raises(hl.PlaceNotFound, match=r"'1' is a module; it holds none"):
        hl.select(model, "1:grad")


@pytest.mark.parametrize("model", [None, "fc", nn.Linear, {}])
def test_a_model_that_is_none_is_told_by_verbs_that_are_functions(model, tmp_path):
    for verb in (
        lambda: hl.select(model),
        lambda: hl.select(model, "fc", nn.Linear),
        lambda: hl.get_module(model, "fc"),
        lambda: hl.get_parameter(model, "fc.weight"),
        lambda: hl.harvest(model, [X], "fc", to=tmp_path / "store"),
        lambda: hl.measure(model, "fc", statistics=[hl.Mean()], data=[X]),
    ):
        with pytest.raises(TypeError, match=r"A model is a torch\.nn\.Module\. Give it first"):
            verb()
