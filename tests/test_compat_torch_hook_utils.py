"""hookline.compat.torch_hook_utils: what the README of torch-hook-utils says, and its edges."""

import copy
import importlib
import io
import threading
from collections import OrderedDict
from collections.abc import Sequence as AbstractSequence
from concurrent.futures import ThreadPoolExecutor
from textwrap import dedent

import pytest
import torch
import torch.distributions as dist
from models import Failing, small
from oracles import assert_clean, bits, by_hand
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.compat import torch_hook_utils
from hookline.compat.torch_hook_utils import (
    Lambda,
    Sample,
    Sequential,
    get_layer_inputs,
    get_layer_outputs,
    named_modules_of_type,
    replace_layer_inputs,
    replace_layer_output,
    replace_layer_outputs,
    save_maxpool_indices,
    use_indices_in_maxunpool,
)


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(bits(found[name]), bits(value)), name


# -- the README ------------------------------------------------------------------------------------

EXAMPLES = """
    import torch
    import torch.distributions as dist
    from torch import nn

    from hookline.compat.torch_hook_utils import get_layer_inputs, named_modules_of_type
    from hookline.compat.torch_hook_utils.layers import Lambda, Sample

    # Some network
    model = nn.Sequential(
        nn.Flatten(),
        nn.LazyLinear(out_features=1),
        Lambda(dist.Normal, scale=0.1),
        Sample(),
    )

    input = torch.rand(1, 4)
    sample_layers = named_modules_of_type(model, Sample)

    # Capture the inputs to all the `Sample` layers
    with get_layer_inputs(sample_layers) as layer_inputs:
        output = model(input)
    print(layer_inputs)
    ---
    from collections import OrderedDict
    from hookline.compat.torch_hook_utils import save_maxpool_indices, use_indices_in_maxunpool

    encoder = nn.Sequential(
        OrderedDict(pool=nn.MaxPool2d(kernel_size=2)),
    )
    with save_maxpool_indices(encoder) as maxpool_indices:
        encoder_output = encoder(
            torch.as_tensor(
                [
                    [
                        [1.0, 2.0],
                        [3.0, 4.0],
                    ]
                ]
            )
        )
    print(maxpool_indices)
    print(encoder_output)

    decoder = nn.Sequential(
        OrderedDict(pool=nn.MaxUnpool2d(kernel_size=2)),
    )
    with use_indices_in_maxunpool(decoder, maxpool_indices):
        decoder_output = decoder(encoder_output)

    print(decoder_output)
"""
FIRST, SECOND = dedent(EXAMPLES).split("---\n")


def test_the_first_example_of_the_readme_gives_a_dict_of_normals(capsys):
    names = {}
    exec(FIRST, names)
    inputs = names["layer_inputs"]
    assert isinstance(inputs, dict)
    assert list(inputs) == ["3"]
    assert type(inputs["3"]) is dist.Normal
    expected = names["model"][1](names["input"])
    assert torch.equal(inputs["3"].loc, expected)
    assert torch.equal(inputs["3"].scale, torch.full_like(expected, 0.1))
    assert capsys.readouterr().out == f"{{'3': {inputs['3']!r}}}\n"


def test_the_second_example_of_the_readme_prints_what_the_readme_says(capsys):
    exec(SECOND, {"torch": torch, "nn": nn})
    assert capsys.readouterr().out == dedent("""\
        {'pool': tensor([[[3]]])}
        tensor([[[4.]]])
        tensor([[[0., 0.],
                 [0., 4.]]])
        """)


def test_every_name_is_where_it_was():
    places = {
        "layers": ["Lambda", "Sample", "Sequential"],
        "types": ["Module", "named_modules_of_type"],
        "maxpool_hooks": ["save_maxpool_indices", "use_indices_in_maxunpool"],
        "input_output_hooks": [
            "get_layer_inputs", "get_layer_outputs", "replace_layer_inputs",
            "replace_layer_output", "replace_layer_outputs",
        ],
    }  # fmt: skip
    found = []
    for part, names in places.items():
        module = importlib.import_module(f"hookline.compat.torch_hook_utils.{part}")
        for name in names:
            assert getattr(module, name) is getattr(torch_hook_utils, name)
        found += names
    assert sorted(found) == sorted(torch_hook_utils.__all__)


# -- collecting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [list, dict, iter, lambda pairs: nn.ModuleDict(dict(pairs))])
def test_inputs_and_outputs_are_those_that_raw_hooks_see(form):
    model, x = small(), torch.randn(5, 3)
    seen = by_hand(model, lambda m: m(x), dict(model.named_children()))
    with get_layer_inputs(form(model.named_children())) as found_inputs:
        with get_layer_outputs(form(model.named_children())) as found_outputs:
            found = model(x)
    assert torch.equal(bits(found), bits(seen.result))
    assert_same_bits(found_inputs, {name: value for name, (value,) in seen.inputs.items()})
    assert_same_bits(found_outputs, {name: value for name, (value,) in seen.outputs.items()})
    assert_clean(model)


def test_the_layers_may_belong_to_several_models():
    one, other, x = small(), small(), torch.randn(5, 3)
    layers = {"one.fc": one[2], "other.fc": other[2]}
    with get_layer_outputs(layers) as outputs:
        expected = {"other.fc": other(x), "one.fc": one(x)}
    assert_same_bits(outputs, expected)
    assert list(outputs) == ["one.fc", "other.fc"]  # in the order in which they were given
    assert_clean(one, other)


def test_a_layer_is_named_as_it_was_given_also_inside_another_one():
    model, x = nn.Sequential(small(), nn.ReLU()), torch.randn(2, 3)
    names = [name for name, _ in model.named_modules()]
    seen = by_hand(model, lambda m: m(x))
    with get_layer_outputs(model.named_modules()) as found:
        model(x)
    assert set(found) == set(names) == {"", "0", "0.0", "0.1", "0.2", "1"}
    assert_same_bits(found, {name: value for name, (value,) in seen.outputs.items()})


def test_an_error_names_a_layer_as_it_was_given():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True)), torch.randn(9, 3)
    with get_layer_outputs({"whole": model, "enc.fc": model[0]}) as outputs:
        model(x)
    with pytest.raises(hl.ValueChanged, match=r"The value at 'enc\.fc' was"):
        outputs["enc.fc"]


def test_other_threads_have_values_of_their_own():
    model, both = small(), threading.Barrier(2)

    def run(x):
        with get_layer_outputs({"fc": model[2]}) as outputs:
            both.wait()
            result = model(x)
            both.wait()
            assert outputs["fc"] is result
        return True

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(run, torch.randn(2, 1, 3)))
    assert_clean(model)


def test_a_layer_under_two_names_is_there_under_both():
    layer, x = nn.Linear(3, 2), torch.randn(1, 3)
    with get_layer_inputs({"a": layer, "b*/[0]": layer}) as inputs:
        layer(x)
    assert_same_bits(inputs, {"a": x, "b*/[0]": x})


def test_the_first_argument_is_the_input_however_it_was_passed():
    layer, x, y = nn.Bilinear(2, 3, 1), torch.randn(4, 2), torch.randn(4, 3)
    with get_layer_inputs({"layer": layer}) as inputs:
        layer(x, y)
        assert torch.equal(inputs["layer"], x)
        layer(input2=y, input1=x + 1)
        assert torch.equal(inputs["layer"], x + 1)


def test_lazy_layers_and_distributions_are_collected():
    model = Sequential(
        nn.LazyLinear(2), Lambda(dist.Normal, scale=0.1), Sample(differentiable=True)
    )
    with get_layer_outputs(model.named_children()) as outputs:
        result = model(torch.rand(3, 4))
    assert type(model[0]) is nn.Linear
    assert list(outputs) == ["0", "1", "2"]
    assert torch.equal(outputs["1"].mean, outputs["0"])
    assert outputs["2"] is result
    assert_clean(model)


def test_the_dict_fills_up_inside_the_block_and_keeps_the_last_run():
    model, x = small(), torch.randn(2, 3)
    with get_layer_outputs([("fc", model[2])]) as outputs:
        assert not outputs
        first = model(x)
        assert outputs["fc"] is first
        second = model(x + 1)
        assert outputs["fc"] is second
        outputs.clear()
        assert "fc" not in outputs
        third = model(x + 2)
        assert outputs["fc"] is third
    assert outputs["fc"] is third
    model(x)
    assert outputs["fc"] is third


def test_the_same_value_may_come_again():
    layer, value = nn.Identity(), nn.Parameter(torch.zeros(1))
    with get_layer_outputs({"layer": layer}) as outputs:
        for _ in range(2):
            layer(value)
            assert outputs.pop("layer") is value
            assert not outputs


def test_only_what_is_wanted_is_kept_alive():
    layer = nn.Identity()
    with get_layer_outputs({"layer": layer}) as outputs:
        for _ in range(5):
            layer(torch.zeros(1000))
        assert outputs._record.nbytes == 4000


def test_outputs_can_be_differentiated_through():
    model, x = small(), torch.randn(2, 3)
    with get_layer_outputs({"hidden": model[0]}) as outputs:
        loss = model(x).square().sum()
    (found,) = torch.autograd.grad(loss, outputs["hidden"])
    leaf = model[0](x).detach().requires_grad_()
    (expected,) = torch.autograd.grad(model[2](F.relu(leaf)).square().sum(), leaf)
    assert torch.equal(found, expected)


def test_what_is_changed_in_place_later_is_kept_as_it_was_or_refused():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True)), torch.randn(9, 3)
    expected = model[0](x)
    assert expected.min() < 0
    with torch.no_grad(), get_layer_outputs(model.named_children()) as outputs:
        model(x)
    assert torch.equal(outputs["0"], expected)
    with get_layer_outputs(model.named_children()) as outputs:
        model(x)
    for read in (
        lambda: outputs["0"], lambda: outputs.get("0"), outputs.items, outputs.values,
        outputs.copy, lambda: dict(outputs), lambda: {**outputs}, lambda: outputs | {},
        lambda: {} | outputs, lambda: outputs.setdefault("0", 1), lambda: outputs.pop("0"),
        lambda: outputs == {"0": 1, "1": 2}, lambda: outputs != {}, lambda: {}.update(outputs),
    ):  # fmt: skip
        with pytest.raises(hl.ValueChanged, match=r"'0'.*in place since.*detach=True"):
            read()
    assert repr(outputs).startswith("{'0': <ValueChanged>, '1': tensor(")


def test_the_dict_is_one():
    layers = {name: nn.Identity() for name in "ab"}
    with get_layer_outputs(layers) as outputs:
        for name in "ba":
            layers[name](name.upper())
    plain = {"a": "A", "b": "B"}
    assert isinstance(outputs, dict)
    assert outputs == plain
    assert plain == outputs
    assert not outputs != plain
    assert dict(outputs) == {**outputs} == outputs.copy() == plain
    assert type(outputs.copy()) is dict
    assert copy.copy(outputs) == copy.deepcopy(outputs) == plain
    assert list(outputs) == list(outputs.keys()) == ["a", "b"]
    assert list(reversed(outputs)) == list(reversed(outputs.keys())) == ["b", "a"]
    assert list(reversed(outputs.values())) == list(reversed(plain.values())) == ["B", "A"]
    assert list(outputs.items()) == list(plain.items())
    assert outputs | {"c": 1} == plain | {"c": 1}
    assert {"c": 1} | outputs == {"c": 1} | plain
    assert repr(outputs) == repr(plain)
    assert outputs.get("a") == "A"
    assert outputs.get("c") is None
    assert "c" not in outputs
    assert outputs.setdefault("c", "C") == outputs["c"] == "C"
    outputs["a"] = "other"
    assert outputs["a"] == "other"
    outputs |= {"b": "also"}
    assert outputs["b"] == "also"
    assert isinstance(outputs, torch_hook_utils.named_layers.LayerValues)
    assert outputs.pop("a") == "other"
    assert outputs.pop("a", 7) == 7
    assert outputs.popitem() == ("c", "C")
    assert list(outputs) == ["b"]


def test_the_dict_is_saved_as_a_plain_one():
    layer, x = nn.Identity(), torch.randn(3)
    with get_layer_outputs({"layer": layer}) as outputs:
        layer(x)
    file = io.BytesIO()
    torch.save(outputs, file)
    file.seek(0)
    assert_same_bits(torch.load(file, weights_only=True), {"layer": x})


def test_layers_that_did_not_run_are_absent_and_reading_says_so():
    model, x = Failing(), torch.randn(1, 3)
    with get_layer_outputs({"first": model.first, "other": nn.Linear(1, 1)}) as outputs:
        model(x)
    assert list(outputs) == ["first"]
    with pytest.raises(KeyError, match=r"'other'.*has not run.*'first'"):
        outputs["other"]
    with pytest.raises(
        hl.NotCaptured, match=r"'third'.*none of the given layers: 'first', 'other'"
    ):
        outputs["third"]


def test_no_layer_ran_is_an_error_that_names_one():
    layers = {"enc.fc": nn.Linear(1, 1), "dec.fc": nn.Linear(1, 1)}
    for context in (
        get_layer_inputs(layers),
        get_layer_outputs(layers),
        replace_layer_inputs(layers, dict.fromkeys(layers, torch.zeros(1))),
        replace_layer_outputs(layers, dict.fromkeys(layers, torch.zeros(1))),
    ):
        with pytest.raises(hl.NeverFired, match=r"'enc\.fc.*any other of the 2 .*given layers"):
            with context:
                pass
    assert_clean(*layers.values())


def test_a_layer_that_torch_never_calls_is_told_of():
    attention = nn.MultiheadAttention(4, 2)
    with pytest.raises(hl.NeverFired, match=r"'self_attn\.out_proj'.*not called"):
        with get_layer_outputs([("self_attn.out_proj", attention.out_proj)]):
            attention(*[torch.rand(3, 2, 4)] * 3)


def test_no_layers_at_all_is_fine():
    with get_layer_inputs([]) as inputs, get_layer_outputs({}) as outputs:
        with replace_layer_inputs({}, {"a": 1}), replace_layer_outputs([], {}):
            nn.Identity()(1)
    assert inputs == outputs == {}


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (nn.Sequential(nn.ReLU()), "a Sequential was.*model.named_modules"),
        (3, "a int was"),
        ([nn.ReLU()], r"Among them is ReLU\(\)"),
        ({"a": 1}, r"Among them is \('a', 1\)"),
        ([("a", nn.ReLU()), ("a", nn.ReLU())], "Two layers .* name 'a'"),
    ],
)
def test_what_has_no_names_is_refused(layers, message):
    for context in (get_layer_inputs(layers), replace_layer_outputs(layers, {})):
        with pytest.raises(hl.PlaceError, match=message):
            with context:
                pytest.fail("entered")


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_nothing_is_left_after_an_exception(error):
    model, x = Failing(error), torch.randn(2, 3)
    layers = [("first", model.first), ("second", model.second)]
    given = dict.fromkeys(["first", "second"], torch.zeros(2, 3))
    with (
        pytest.raises(type(error)) as caught,
        get_layer_inputs(layers) as inputs,
        get_layer_outputs(layers) as outputs,
        replace_layer_inputs(layers, given),
        replace_layer_outputs(layers, given),
    ):
        model(x)
    assert caught.value is error
    assert list(inputs) == list(outputs) == ["first"]
    assert torch.equal(inputs["first"], x)
    assert_clean(model)


# -- replacing -------------------------------------------------------------------------------------


def test_replaced_inputs_give_what_a_raw_hook_gives():
    model, x, other = small(), torch.randn(5, 3), torch.randn(5, 4)
    handle = model[2].register_forward_pre_hook(lambda module, args: (other,))
    expected = model(x)
    handle.remove()
    before = model(x)
    for layers in ({"fc": model[2]}, [("fc", model[2])], iter([("fc", model[2])])):
        with replace_layer_inputs(layers, {"fc": other, "more": other}):
            found = model(x)
        assert torch.equal(bits(found), bits(expected))
    assert torch.equal(model(x), before)
    assert_clean(model)


def test_replaced_outputs_give_what_a_raw_hook_gives():
    model, x, other = small(), torch.randn(5, 3), torch.randn(5, 4)
    handle = model[1].register_forward_hook(lambda module, args, output: other)
    expected = model(x)
    handle.remove()
    for layers in ({"relu": model[1]}, [("relu", model[1])]):
        with get_layer_inputs(layers) as inputs:
            with replace_layer_outputs(layers, {"relu": other}):
                found = model(x)
        assert torch.equal(bits(found), bits(expected))
        assert torch.equal(inputs["relu"], model[0](x))  # the layer still ran
    assert_clean(model)


def test_the_singular_of_the_readme_is_the_same():
    assert replace_layer_output is replace_layer_outputs


def test_what_one_run_gave_can_be_put_into_another():
    model, x = nn.Sequential(small(), nn.Softplus()), torch.randn(2, 3)
    layers = named_modules_of_type(model, (nn.Linear, nn.Softplus))
    with get_layer_inputs(layers) as inputs, get_layer_outputs(layers) as outputs:
        expected = model(x)
    with replace_layer_inputs(layers, inputs):
        assert torch.equal(model(x + 1), expected)
    with replace_layer_outputs(layers, outputs):
        assert torch.equal(model(x + 1), expected)
    assert not torch.equal(model(x + 1), expected)


def test_distributions_can_be_replaced_by_others():
    model = Sequential(nn.Flatten(), nn.Linear(4, 1), Lambda(dist.Normal, scale=0.1), Sample())
    x = torch.rand(1, 4)
    with replace_layer_inputs(named_modules_of_type(model, Sample), {"3": dist.Normal(7, 1e-6)}):
        assert torch.allclose(model(x), torch.tensor(7.0), atol=1e-3)
    with replace_layer_outputs({"2": model[2]}, {"2": dist.Bernoulli(torch.ones(3))}):
        assert torch.equal(model(x), torch.ones(3))


def test_only_the_first_argument_is_replaced():
    layer, x, y = nn.Bilinear(2, 3, 1), torch.randn(4, 2), torch.randn(4, 3)
    expected = layer(x, y)
    with replace_layer_inputs({"layer": layer}, {"layer": x}):
        assert torch.equal(layer(x * 0, y), expected)
        assert torch.equal(layer(input2=y, input1=x * 0), expected)


def test_an_input_may_have_another_shape_and_a_tuple_of_one_is_its_content():
    model, x, other = small(), torch.randn(5, 3), torch.randn(5, 4)
    with replace_layer_inputs({"fc": model[2]}, {"fc": other}):
        expected = model(x)
    with replace_layer_inputs({"fc": model[2]}, {"fc": (other,)}):
        assert torch.equal(model(x), expected)
    with replace_layer_inputs({"fc": model[2]}, {"fc": other[:1]}):
        assert torch.equal(model(x), model[2](other[:1]))
    assert_clean(model)


def test_nested_outputs_can_be_replaced():
    lstm, x = nn.LSTM(2, 3), torch.randn(4, 1, 2)
    with get_layer_outputs({"lstm": lstm}) as outputs:
        lstm(x)
    with replace_layer_outputs({"lstm": lstm}, outputs):
        y, (h, c) = lstm(x + 1)
    assert torch.equal(y, outputs["lstm"][0])
    assert torch.equal(h, outputs["lstm"][1][0])
    assert torch.equal(c, outputs["lstm"][1][1])


def test_gradients_flow_into_what_was_given_and_the_model_cannot_change_it():
    model, x = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)), torch.randn(3)
    given = torch.tensor([-1.0, 2.0, 3.0], requires_grad=True)
    for context in (
        replace_layer_inputs({"relu": model[1]}, {"relu": given}),
        replace_layer_outputs({"id": model[0]}, {"id": given}),
    ):
        with context:
            y = model(x)
        assert torch.equal(y, torch.tensor([0.0, 2.0, 3.0]))
        assert torch.equal(given, torch.tensor([-1.0, 2.0, 3.0]))
        (found,) = torch.autograd.grad(y.sum(), given)
        assert torch.equal(found, torch.tensor([0.0, 1.0, 1.0]))


@pytest.mark.parametrize("given", [{"a": torch.zeros(1)}, {"a": torch.zeros(1), "fc": None}])
def test_a_layer_without_a_value_is_named(given):
    layers = {"a": nn.Identity(), "fc": nn.Identity()}
    for context, port in (
        (replace_layer_inputs(layers, given), "input"),
        (replace_layer_outputs(layers, given), "output"),
    ):
        with pytest.raises(KeyError, match=rf"The {port} of the layer 'fc'.*for 'a'[.]"):
            with context:
                pytest.fail("entered")
    assert_clean(*layers.values())


# -- pools -----------------------------------------------------------------------------------------

POOLS = {
    "max 1d": (nn.MaxPool1d(2), (2, 3, 8), F.max_pool1d, (2,)),
    "max 2d": (nn.MaxPool2d(2), (2, 3, 8, 6), F.max_pool2d, (2,)),
    "max 3d": (nn.MaxPool3d(2), (2, 3, 4, 6, 8), F.max_pool3d, (2,)),
    "adaptive 1d": (nn.AdaptiveMaxPool1d(4), (2, 3, 8), F.adaptive_max_pool1d, (4,)),
    "adaptive 2d": (nn.AdaptiveMaxPool2d(3), (2, 3, 9, 6), F.adaptive_max_pool2d, (3,)),
    "adaptive 3d": (nn.AdaptiveMaxPool3d(2), (1, 2, 4, 6, 8), F.adaptive_max_pool3d, (2,)),
}
UNPOOLS = {1: nn.MaxUnpool1d(2), 2: nn.MaxUnpool2d(2), 3: nn.MaxUnpool3d(2)}


@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("gradient", [False, True])
def test_the_indices_of_every_kind_of_pool_are_saved_and_its_output_is_as_ever(kind, gradient):
    pool, shape, function, arguments = POOLS[kind]
    model = nn.Sequential(nn.Identity(), pool)
    x = torch.randn(shape, requires_grad=gradient)
    output, indices = function(x, *arguments, return_indices=True)
    with save_maxpool_indices(model) as saved:
        found = model(x)
        assert_same_bits(saved, {"1": indices})  # inside the block, too
    assert_same_bits(saved, {"1": indices})
    assert torch.equal(bits(found), bits(output))
    if gradient:
        assert torch.equal(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (found, output)))
    assert pool.return_indices is False
    assert_clean(model)


@pytest.mark.parametrize("dimensions", UNPOOLS)
@pytest.mark.parametrize("gradient", [False, True])
def test_every_kind_of_unpool_uses_the_indices_that_were_saved(dimensions, gradient):
    pool, shape, function, arguments = POOLS[f"max {dimensions}d"]
    unpool = UNPOOLS[dimensions]
    x = torch.randn(shape, requires_grad=gradient)
    output, indices = function(x, *arguments, return_indices=True)
    expected = unpool(output, indices)
    with save_maxpool_indices(nn.Sequential(pool)) as saved:
        pool(x)
    with use_indices_in_maxunpool(nn.Sequential(unpool), saved):
        found = unpool(output)
    assert torch.equal(bits(found), bits(expected))
    assert_clean(unpool)
    with pytest.raises(TypeError, match="indices"):
        unpool(output)


def test_layers_that_return_their_indices_go_on_doing_so():
    pools = nn.ModuleDict({"quiet": nn.MaxPool1d(2), "open": nn.MaxPool1d(2, return_indices=True)})
    x = torch.randn(1, 1, 4)
    expected, indices = pools["open"](x)
    with save_maxpool_indices(pools) as saved:
        assert torch.equal(pools["quiet"](x), expected)
        output, returned = pools["open"](x)
    assert torch.equal(output, expected)
    assert torch.equal(returned, indices)
    assert_same_bits(saved, {"quiet": indices, "open": indices})
    assert not pools["quiet"].return_indices
    assert pools["open"].return_indices
    assert torch.equal(pools["quiet"](x), expected)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_return_indices_is_put_back_after_an_exception(error):
    pool = nn.MaxPool1d(2)
    opened = nn.AdaptiveMaxPool1d(2, return_indices=True)
    model = nn.Sequential(pool, Failing(error))
    seen = []
    pool.register_forward_hook(lambda *_: seen.append(pool.return_indices))
    with (
        pytest.raises(type(error)) as caught,
        save_maxpool_indices({"pool": pool, "opened": opened}),
    ):
        model(torch.randn(1, 6))
    assert caught.value is error
    assert seen == [True]
    assert pool.return_indices is False
    assert opened.return_indices is True
    with pytest.raises(RuntimeError, match="1-dimensional"), save_maxpool_indices(pool):
        pool(torch.randn(3))  # raises itself
    assert pool.return_indices is False
    pool._forward_hooks.clear()
    assert_clean(model, opened)


def test_a_module_without_pools_is_fine():
    model = small()
    with save_maxpool_indices(model) as indices:
        with use_indices_in_maxunpool(model, indices), use_indices_in_maxunpool(model, []):
            model(torch.randn(1, 3))
    assert indices == {}


def test_a_layer_that_has_no_indices_is_refused_by_name():
    pool = nn.MaxPool1d(2)
    with pytest.raises(hl.NotHookable, match=r"'conv'.* a Conv1d, which has none"):
        with save_maxpool_indices({"pool": pool, "conv": nn.Conv1d(1, 1, 1)}):
            pytest.fail("entered")
    assert pool.return_indices is False
    assert_clean(pool)


def test_a_pool_itself_can_be_the_module():
    pool, unpool, x = nn.MaxPool1d(2), nn.MaxUnpool1d(2), torch.tensor([[1.0, 2.0, 4.0, 3.0]])
    with save_maxpool_indices(pool) as indices:
        y = pool(x)
    assert list(indices) == [""]
    with use_indices_in_maxunpool(unpool, indices):
        assert torch.equal(unpool(y), torch.tensor([[0.0, 2.0, 4.0, 0.0]]))


def test_a_pool_that_runs_twice_is_an_error_that_names_it():
    pool, x = nn.MaxPool1d(2), torch.randn(1, 1, 8)
    model = nn.Sequential(OrderedDict(first=pool, again=pool))  # one layer, two uses
    with pytest.raises(hl.SeveralCalls, match=r"'first'.*runs a second time.*of its own") as caught:
        with save_maxpool_indices(model) as indices:
            model(x)
    assert "'first:input'" in caught.value.__notes__[0]
    assert torch.equal(indices["first"], F.max_pool1d(x, 2, return_indices=True)[1])
    assert pool.return_indices is False
    assert_clean(model)


def test_a_pool_may_run_again_when_its_indices_were_taken():
    pool, found = nn.MaxPool1d(2), []
    inputs = torch.randn(3, 1, 1, 8)
    with save_maxpool_indices({"pool": pool}) as indices:
        for x in inputs:
            pool(x)
            found.append(indices.pop("pool"))
    for x, saved in zip(inputs, found, strict=True):
        assert torch.equal(saved, F.max_pool1d(x, 2, return_indices=True)[1])


def test_a_pool_may_run_in_other_threads_meanwhile():
    encoder, x, other = nn.Sequential(nn.MaxPool1d(2)), torch.randn(1, 4), torch.randn(3, 4)
    with ThreadPoolExecutor(1) as pool, save_maxpool_indices(encoder) as indices:
        encoder(x)
        assert torch.equal(pool.submit(encoder, other).result(), F.max_pool1d(other, 2))
    assert_same_bits(indices, {"0": F.max_pool1d(x, 2, return_indices=True)[1]})


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_pool_that_is_recomputed_has_not_run_twice(reentrant):
    model = nn.Sequential(nn.Conv1d(1, 1, 1), nn.MaxPool1d(2))
    x = torch.randn(1, 1, 8, requires_grad=True)
    expected = model(x)
    (gradient,) = torch.autograd.grad(expected.square().sum(), x)
    with save_maxpool_indices(model) as indices:
        y = checkpoint(model, x, use_reentrant=reentrant)
        y.square().sum().backward()
    assert torch.equal(y, expected)
    assert torch.equal(x.grad, gradient)
    assert torch.equal(indices["1"], F.max_pool1d(model[0](x), 2, return_indices=True)[1])
    assert_clean(model)


class Coder(nn.Module):
    """An encoder with pools, or a decoder with unpools, at two depths, three in all."""

    def __init__(self, kind):
        super().__init__()
        self.outer = nn.Sequential(OrderedDict(act=nn.Softplus(), pool=kind(2)))
        self.inner = nn.ModuleDict(
            {"left": nn.Sequential(OrderedDict(pool=kind(2))), "right": kind(2)}
        )

    def encode(self, x):
        x = self.outer(x)
        return self.inner["left"](x), self.inner["right"](-x)

    def decode(self, left, right):
        return self.outer(self.inner["left"](left) + self.inner["right"](right))

    def forward(self, *args):
        return self.encode(*args) if len(args) == 1 else self.decode(*args)


NAMES = ["outer.pool", "inner.left.pool", "inner.right"]


@pytest.fixture
def coded():
    """An input, its indices in a nested encoder, its code, and what the decoder makes of that."""
    x = torch.randn(2, 3, 8, 8)
    hidden, first = F.max_pool2d(F.softplus(x), 2, return_indices=True)
    left, second = F.max_pool2d(hidden, 2, return_indices=True)
    right, third = F.max_pool2d(-hidden, 2, return_indices=True)
    merged = F.max_unpool2d(left, second, 2) + F.max_unpool2d(right, third, 2)
    decoded = F.max_unpool2d(F.softplus(merged), first, 2)
    return x, dict(zip(NAMES, (first, second, third), strict=True)), (left, right), decoded


def test_several_pools_of_nested_encoders_and_decoders(coded):
    x, expected, code, decoded = coded
    encoder, decoder = Coder(nn.MaxPool2d), Coder(nn.MaxUnpool2d)
    with save_maxpool_indices(encoder) as indices:
        found = encoder(x)
    assert all(map(torch.equal, found, code))
    assert_same_bits(indices, expected)
    with use_indices_in_maxunpool(decoder, indices):
        assert torch.equal(decoder(*code), decoded)
    assert list(indices) == NAMES
    assert_clean(encoder, decoder)


def test_indices_as_a_list_are_for_the_layers_in_their_order(coded):
    _, indices, code, decoded = coded
    decoder = Coder(nn.MaxUnpool2d)
    with use_indices_in_maxunpool(decoder, list(indices.values())):
        assert torch.equal(decoder(*code), decoded)
    with use_indices_in_maxunpool(decoder, iter(indices.values())):
        assert torch.equal(decoder(*code), decoded)
    with pytest.raises(hl.ChangeError, match=r"'inner.right' .*\(2, 3, 4, 4\).*reverse order"):
        with use_indices_in_maxunpool(decoder, list(indices.values())[::-1]):
            decoder(*code)


@pytest.mark.parametrize(
    ("count", "message"),
    [(2, "a list of 2.* 'inner.right' would have none"), (4, "a list of 4.* 'inner.right'[.]")],
)
def test_a_list_that_is_too_short_or_too_long_names_the_layers(coded, count, message):
    decoder, given = Coder(nn.MaxUnpool2d), [torch.zeros(1)] * count
    with pytest.raises(hl.ChangeError, match=message):
        with use_indices_in_maxunpool(decoder, given, consume_indices=True):
            pytest.fail("entered")
    assert len(given) == count
    assert_clean(decoder)


def test_a_layer_whose_indices_are_missing_is_named(coded):
    _, indices, code, _ = coded
    decoder = Coder(nn.MaxUnpool2d)
    del indices["inner.right"]
    with pytest.raises(KeyError, match=r"'inner.right' .*without indices.* 'outer.pool', 'inner.l"):
        with use_indices_in_maxunpool(decoder, indices):
            decoder(*code)
    assert_clean(decoder)


@pytest.mark.parametrize("consume", [True, False])
def test_indices_for_no_layer_do_no_harm(coded, consume):
    _, indices, code, decoded = coded
    decoder, given = Coder(nn.MaxUnpool2d), indices | {"of another pool": torch.zeros(1)}
    with use_indices_in_maxunpool(decoder, given, consume_indices=consume):
        assert torch.equal(decoder(*code), decoded)
    assert list(given) == ["of another pool"] if consume else [*indices, "of another pool"]
    with pytest.raises(
        KeyError, match=r"without indices.* 'right'.*Name the indices as the layers"
    ):
        with use_indices_in_maxunpool(decoder, {"right": indices["inner.right"]}):
            decoder(*code)
    assert_clean(decoder)


@pytest.mark.parametrize("form", [dict, lambda layers: list(layers.items())])
def test_pools_and_unpools_can_be_given_by_names_of_choice(coded, form):
    x, expected, _, decoded = coded
    encoder, decoder = Coder(nn.MaxPool2d), Coder(nn.MaxUnpool2d)
    pools, unpools = (
        form({f"layer {n}": model.get_submodule(name) for n, name in enumerate(NAMES)})
        for model in (encoder, decoder)
    )
    # Both are entered before the encoder runs: indices are looked up when they are needed.
    with save_maxpool_indices(pools) as indices, use_indices_in_maxunpool(unpools, indices):
        assert torch.equal(decoder(*encoder(x)), decoded)
    assert list(indices) == ["layer 0", "layer 1", "layer 2"]
    assert all(map(torch.equal, indices.values(), expected.values()))


def test_indices_that_are_used_can_be_consumed(coded):
    _, indices, code, decoded = coded
    decoder, given = Coder(nn.MaxUnpool2d), list(indices.values())
    with use_indices_in_maxunpool(decoder, indices, consume_indices=True):
        assert list(indices) == NAMES
        assert torch.equal(decoder(*code), decoded)
        assert indices == {}
        assert torch.equal(decoder(*code), decoded)  # for the whole block, as ever
    with use_indices_in_maxunpool(decoder, given, consume_indices=True):
        assert given == []
        assert torch.equal(decoder(*code), decoded)


def test_indices_that_were_not_used_are_not_consumed():
    unpools = nn.ModuleDict({"used": nn.MaxUnpool1d(2), "idle": nn.MaxUnpool1d(2)})
    indices = dict.fromkeys(unpools, torch.tensor([[0]]))
    with use_indices_in_maxunpool(unpools, indices, consume_indices=True):
        unpools["used"](torch.ones(1, 1))
    assert list(indices) == ["idle"]


def test_consumed_indices_make_room_for_the_next_run(coded):
    x, _, _, decoded = coded
    encoder, decoder = Coder(nn.MaxPool2d), Coder(nn.MaxUnpool2d)
    with save_maxpool_indices(encoder) as indices:
        with use_indices_in_maxunpool(decoder, indices, consume_indices=True):
            for _ in range(3):
                other = decoder(*encoder(-x))
                assert torch.equal(decoder(*encoder(x)), decoded)
                assert not torch.equal(other, decoded)
    assert indices == {}


def test_the_size_of_the_output_can_be_given_as_ever_or_in_the_place_of_the_indices():
    x = torch.randn(1, 1, 7)
    pool, unpool = nn.MaxPool1d(2), nn.MaxUnpool1d(2)
    y, indices = F.max_pool1d(x, 2, return_indices=True)
    expected = unpool(y, indices, output_size=[7])
    assert expected.shape == x.shape
    with use_indices_in_maxunpool({"unpool": unpool}, {"unpool": indices}):
        assert torch.equal(unpool(y, output_size=[7]), expected)
        assert torch.equal(unpool(input=y, output_size=[7]), expected)
        assert torch.equal(unpool(y, [7]), expected)
        assert torch.equal(unpool(y), unpool(y, indices))
    assert pool(x).shape == y.shape


def test_indices_that_the_decoder_gives_itself_are_used_unless_there_are_others():
    unpools = nn.ModuleDict({"own": nn.MaxUnpool1d(2), "given": nn.MaxUnpool1d(2)})
    y, first, second = torch.ones(1, 1), torch.tensor([[0]]), torch.tensor([[1]])
    with use_indices_in_maxunpool(unpools, {"given": second}):
        assert torch.equal(unpools["own"](y, first), torch.tensor([[1.0, 0.0]]))
        assert torch.equal(unpools["given"](y, first), torch.tensor([[0.0, 1.0]]))
        assert torch.equal(unpools["given"](y, indices=first), torch.tensor([[0.0, 1.0]]))
        with pytest.raises(hl.NotCaptured, match="'own' was called without indices"):
            unpools["own"](y)
        with pytest.raises(hl.NotCaptured, match="'own' was called without indices"):
            unpools["own"](y, [2])


def test_saved_indices_stay_as_they_were():
    pool, x = nn.MaxPool1d(2, return_indices=True), torch.randn(1, 1, 8)
    with save_maxpool_indices(pool) as indices:
        _, returned = pool(x)
        expected = returned.clone()
        returned.zero_()
    assert torch.equal(indices[""], expected)


# -- layers ----------------------------------------------------------------------------------------


def test_modules_of_a_type_come_with_their_names_once_each_and_can_be_used_again():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared), nn.Conv1d(1, 1, 1))
    found = named_modules_of_type(model, (nn.Linear, nn.Conv1d))
    assert list(found) == list(found) == [("0", shared), ("2", model[2])]
    assert named_modules_of_type(model, nn.Sequential) == [("", model), ("1", model[1])]
    assert named_modules_of_type(model, nn.LSTM) == []


def test_lambda_calls_the_function_with_what_was_bound_and_what_comes():
    layer = Lambda(torch.addcmul, torch.ones(2), value=3.0)
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 7.0])
    assert torch.equal(layer(x, y), 1 + 3 * x * y)
    assert torch.equal(layer(x, y, value=1.0), 1 + x * y)
    assert Lambda(torch.relu).f is torch.relu
    fc = nn.Linear(2, 1)
    assert dict(Lambda(fc).named_parameters()).keys() == {"f.weight", "f.bias"}
    assert torch.equal(Lambda(fc)(x), fc(x))


def test_lambda_shows_its_function():
    class Callable:
        def __call__(self, x):
            return x

        def __repr__(self):
            return "an object"

    assert repr(Lambda(F.relu)) == "Lambda(f=torch.nn.functional.relu)"
    assert repr(Lambda(Callable())) == "Lambda(f=an object)"
    assert repr(Lambda(dist.Normal, 0.0, scale=0.1)) == (
        "Lambda(f=functools.partial(torch.distributions.normal.Normal, 0.0, scale=0.1))"
    )
    assert repr(Sample(differentiable=True)) == "Sample(differentiable=True)"


def test_sample_draws_and_lets_gradients_through_only_if_asked():
    loc = torch.zeros(3, requires_grad=True)
    torch.manual_seed(0)
    expected = dist.Normal(loc, 1.0).sample()
    for differentiable in (False, True):
        layer = Sample(differentiable)
        assert isinstance(layer, Lambda)
        assert layer.differentiable is differentiable
        torch.manual_seed(0)
        drawn = layer(dist.Normal(loc, 1.0))
        assert torch.equal(drawn, expected)
        assert drawn.requires_grad is differentiable


def test_sequential_takes_functions_names_and_mappings():
    x, fc = torch.tensor([-1.0, 2.0]), nn.Linear(2, 2)
    for model in (Sequential(fc, torch.relu), Sequential(a=fc, b=torch.relu),
                  Sequential({"a": fc, "b": torch.relu}),
                  Sequential(OrderedDict(a=fc, b=torch.relu))):  # fmt: skip
        assert isinstance(model, nn.Sequential)
        assert isinstance(model, AbstractSequence)
        assert torch.equal(model(x), torch.relu(fc(x)))
        assert model[0] is fc
        assert type(model[1]) is Lambda
        assert len(model) == 2
        assert list(model) == [model[0], model[-1]]
        assert fc in model
        assert type(model[:1]) is Sequential
        assert list(model[:1]) == [fc]
        assert list(dict(model[1:].named_children())) == list(dict(model.named_children()))[1:]
    assert list(dict(Sequential(a=fc, b=torch.relu).named_children())) == ["a", "b"]


def test_sequential_calls_its_first_layer_with_all_arguments():
    model, x, y = Sequential(nn.Bilinear(2, 3, 4), torch.relu), torch.ones(1, 2), torch.ones(1, 3)
    expected = torch.relu(model[0](x, y))
    assert torch.equal(model(x, y), expected)
    assert torch.equal(model(x, input2=y), expected)
    assert Sequential()(x) is x


def test_sequential_refuses_layers_with_and_without_names():
    with pytest.raises(TypeError, match="1 layers without a name and 1 with one"):
        Sequential(nn.ReLU(), b=nn.ReLU())
