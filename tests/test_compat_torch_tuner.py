"""`hookline.compat.torch_tuner` against torch-tuner 0.1.0, and against torch's own hooks."""

import copy
import random
from contextlib import chdir

import pytest
import torch
import torch_tuner
from models import perceptron
from oracles import assert_clean, bits, weigh
from torch import nn
from tuner_hooks import (
    CHANGED,
    FOLDERS,
    HOOK_KINDS,
    PORTS,
    assert_equal_nested,
    outcomes,
    register,
    row_batches,
    saved_files,
    saved_names,
)

import hookline as hl
from hookline.compat import torch_tuner as compat
from hookline.compat.torch_tuner import Hooks

pytestmark = pytest.mark.usefixtures("folder")  # each test works in a folder of its own


def compare(folder, make, use):
    """Do the same with the original and with ours: the same comes out, and the same is saved."""
    found = []
    for library in (torch_tuner, compat):
        place = folder / library.__name__
        place.mkdir()
        with chdir(place):
            model = make()
            result = use(library.Hooks, model)
        found.append((result, saved_files(place)))
    (expected, files), (result, ours) = found
    assert len(result) == len(expected) > 0
    for one, other in zip(result, expected, strict=True):
        assert torch.equal(one, other)
    assert list(ours) == list(files)
    for name, value in files.items():
        assert_equal_nested(ours[name], value)
    return ours


# -- as the original does -------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1, 2, 4, -1])
@pytest.mark.parametrize("kind", HOOK_KINDS)
def test_visualize_saves_the_files_of_the_original(folder, kind, layer):
    def use(hooks, model):
        register(hooks(model, layer), kind, visualize=True)
        return outcomes(model, row_batches(8, 8, 3))

    files = compare(folder, perceptron, use)
    assert len(files) == (6 if kind in ("fh", "fbh") else 3)
    assert all(name.startswith(FOLDERS[kind]) for name in files)


def test_files_are_named_by_value_iteration_batch_size_and_layer(folder):
    model = perceptron()
    for kind in HOOK_KINDS:
        register(Hooks(model, 2), kind, visualize=True)
    outcomes(model, row_batches(8))
    ending = "_0_batch_size_8_layer_2"
    assert sorted(saved_files(folder)) == [
        f"saved_forward_hook_values/input{ending}_forward_hook_tensor.pt",
        f"saved_forward_hook_values/output{ending}_forward_hook_tensor.pt",
        f"saved_forward_prehook_inputs/inputs{ending}_forward_prehook_tensor.pt",
        f"saved_full_backward_hook_gradients/grad_input{ending}_full_backward_hook_tensor.pt",
        f"saved_full_backward_hook_gradients/grad_output{ending}_full_backward_hook_tensor.pt",
        f"saved_full_backward_prehook_gradients/grad_output{ending}_full_backward_prehook_tensor.pt",
    ]


@pytest.mark.parametrize("by", ["number", "tensor", "row", "values", "both"])
@pytest.mark.parametrize("kind", HOOK_KINDS)
def test_update_changes_what_the_original_changes(folder, kind, by):
    torch.manual_seed(2)
    shape = (8, 5 if CHANGED[kind] == "output" else 4)
    noise = {"number": 0.3, "tensor": torch.randn(shape), "row": torch.randn(shape[1]), "both": 1.7}
    values = torch.randn(shape) if by in ("values", "both") else None

    def use(hooks, model):
        register(hooks(model, 2), kind, noise=noise.get(by), values=values)
        return outcomes(model, row_batches(8, 8))

    compare(folder, perceptron, use)
    bare = outcomes(perceptron(), row_batches(8, 8))
    changed = use(Hooks, perceptron())
    assert not all(torch.equal(a, b) for a, b in zip(changed, bare, strict=True))


@pytest.mark.parametrize("kind", HOOK_KINDS)
def test_new_values_are_multiplied_by_the_noise(kind):
    model = perceptron()
    shape = (8, 5 if CHANGED[kind] == "output" else 4)
    register(Hooks(model, 2), kind, noise=3.0, values=torch.full(shape, 2.0))
    port = PORTS[kind]
    with hl.capture(model, f"2{port}") as record:
        outcomes(model, row_batches(8))
    assert torch.equal(record[f"2{port}"], torch.full(shape, 6.0))


@pytest.mark.parametrize("seed", range(30))
def test_all_hooks_in_one_instance_act_as_in_the_original_in_any_order(folder, seed):
    order = [(kind, how) for kind in HOOK_KINDS for how in ("update", "visualize")]
    random.Random(seed).shuffle(order)
    order = order[: 2 + seed % 7]

    def use(hooks, model):
        one = hooks(model, 2)
        for kind, how in order:
            noise = {"fh": 0.5, "fph": 3.0, "fbh": -0.25, "fbph": 7.0}[kind]
            register(one, kind, **({"noise": noise} if how == "update" else {"visualize": True}))
        return outcomes(model, row_batches(8, 3))

    compare(folder, perceptron, use)


@pytest.mark.parametrize("how", ["update", "visualize"])
@pytest.mark.parametrize("kind", HOOK_KINDS)
def test_a_removed_handle_acts_no_more_and_the_iteration_counts_on(folder, kind, how):
    def use(hooks, model):
        one = hooks(model, 2)
        given = {"noise": 2.0} if how == "update" else {"visualize": True}
        found = []
        for _ in range(2):
            handle = register(one, kind, **given)
            found += outcomes(model, row_batches(4))
            assert handle.remove() is None
            handle.remove()
            found += outcomes(model, row_batches(4, 3))
        with register(one, kind, **given) as same:
            found += outcomes(model, row_batches(4))
        assert same is not None
        found += outcomes(model, row_batches(4))
        assert_clean(model)
        return found

    files = compare(folder, perceptron, use)
    assert len(files) == (0 if how == "update" else 6 if kind in ("fh", "fbh") else 3)


@pytest.mark.parametrize("kind", ["fh", "fbph", "fbh"])
def test_a_removed_handle_stays_removed_when_others_are_registered(folder, kind):
    model = perceptron()
    hooks = Hooks(model, 2)
    register(hooks, kind, visualize=True).remove()
    register(hooks, "fph", noise=2.0)
    outcomes(model, row_batches(4))
    assert saved_names(folder) == []


def test_hooks_act_without_their_handle_and_are_listed(folder):
    model = perceptron()
    Hooks(model, 2).register_fh(update=True, add_noise_output=True, noise_output=0.0)
    assert torch.equal(model[2](torch.ones(1, 4)), torch.zeros(1, 5))
    assert len(hl.attached(model)) == 1
    hl.attached(model).remove()
    assert model[2](torch.ones(1, 4)).any()


class CallsSharedTwice(nn.Module):
    """Calls one layer several times, and another one once."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(3, 3)
        self.last = nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.shared(torch.tanh(self.shared(x)).repeat(2, 1)))


@pytest.mark.parametrize("kind", HOOK_KINDS)
def test_a_layer_that_is_called_twice_has_two_iterations(folder, kind):
    def use(hooks, model):
        register(hooks(model, 0), kind, visualize=True)
        return outcomes(model, row_batches(4, 2))

    files = compare(folder, CallsSharedTwice, use)
    assert len(files) == (8 if kind in ("fh", "fbh") else 4)


@pytest.mark.parametrize("kind", ["fbh", "fbph"])
def test_each_backward_pass_is_an_iteration_and_a_forward_alone_is_none(folder, kind):
    def use(hooks, model):
        register(hooks(model, 2), kind, visualize=True)
        (x,) = row_batches(4)
        model(x)
        y = model(x.requires_grad_())
        weigh(y).backward(retain_graph=True)
        weigh(y.square()).backward()
        first, second = model(x), model(x * 2)  # the later one is used first
        weigh(second).backward()
        weigh(first).backward()
        with torch.no_grad():
            model(x)
        return [x.grad]

    files = compare(folder, perceptron, use)
    assert len(files) == (8 if kind == "fbh" else 4)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_without_a_gradient_for_the_input_that_of_the_output_is_saved(folder):
    def use(hooks, model):
        register(hooks(model, 0), "fbh", visualize=True)
        y = model(*row_batches(4))
        weigh(y).backward()
        return [y]

    (name,) = compare(folder, perceptron, use)
    assert "/grad_output_0_batch_size_4_layer_0" in name


def test_a_tuple_that_a_layer_returns_is_one_file(folder):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.LSTM(3, 4, batch_first=True))

    def use(hooks, model):
        register(hooks(model, 0), "fh", visualize=True)
        return [model(torch.ones(5, 2, 3))[0]]

    files = compare(folder, make, use)
    output, (hidden, cell) = list(files.values())[1]
    assert (output.shape, hidden.shape, cell.shape) == ((5, 2, 4), (1, 5, 4), (1, 5, 4))


@pytest.mark.parametrize("layer", [0, 2, 4, -1])
def test_the_shape_of_a_linear_layer_is_that_of_the_original(layer):
    model = perceptron()
    expected = torch_tuner.Hooks(model, layer).get_shape_of_layer()
    assert Hooks(model, layer).get_shape_of_layer() == expected


def test_the_attributes_of_the_original_are_there():
    model = perceptron()
    original, ours = torch_tuner.Hooks(model, 2), Hooks(model, 2)
    assert (ours.object, ours.layer_index, ours.layers) == (model, 2, original.layers)
    assert Hooks(model).layer_index is None


@pytest.mark.parametrize("kind", HOOK_KINDS)
def test_arguments_are_those_of_the_original_in_their_order(kind):
    model = perceptron()
    seen = []
    hook_of = getattr(Hooks(model, 2), f"register_{kind}")
    noise = torch.tensor(0.0)
    hook_of(True, False, True, False, noise, None)
    port = PORTS[kind]
    with hl.hook(model, f"2{port}", lambda value: seen.append(value.count_nonzero())):
        outcomes(model, row_batches(4))
    assert seen == [0]


# -- where the original differs from its documentation --------------------------------------------


def test_each_registration_has_its_own_noise_and_values():
    model = nn.Sequential(nn.Identity())
    hooks = Hooks(model, 0)
    x = torch.ones(2)
    with register(hooks, "fh", noise=2.0):
        with register(hooks, "fh", noise=3.0):
            assert torch.equal(model(x), x * 6)
        assert torch.equal(model(x), x * 2)
    with register(hooks, "fh", values=x * 5):
        assert torch.equal(model(x), x * 5)
    assert torch.equal(model(x), x)


def test_nothing_is_printed(capsys):
    model = perceptron()
    for kind in HOOK_KINDS:
        register(Hooks(model, 2), kind, visualize=True, noise=2.0)
    outcomes(model, row_batches(4))
    Hooks(model, 0).get_shape_of_layer()
    assert capsys.readouterr() == ("", "")


def test_saved_tensors_do_not_require_grad(folder):
    model = perceptron()
    for kind in HOOK_KINDS:
        register(Hooks(model, 2), kind, visualize=True)
    outcomes(model, row_batches(4))
    assert saved_files(folder)
    assert not any(value.requires_grad for value in saved_files(folder).values())


def test_a_slice_is_saved_without_the_memory_that_it_is_a_view_of(folder):
    class Slice(nn.Module):
        def forward(self, x):
            return x[:1]

    model = nn.Sequential(Slice())
    register(Hooks(model, 0), "fh", visualize=True)
    model(torch.ones(100_000))
    (file,) = folder.rglob("output_*")
    assert file.stat().st_size < 10_000


# -- layers ---------------------------------------------------------------------------------------


class Nest(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.ModuleDict({"a/b": nn.Linear(3, 3), "x[0]": nn.Linear(3, 3)})
        self.head = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))

    def forward(self, x):
        for layer in self.body.values():
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("layer", "labels"),
    [
        (1, ["1"]),
        (-1, ["-1"]),
        ("head", ["head"]),
        ("head.2", ["head.2"]),
        (lambda model: model.head[0], ["head.0"]),
        (lambda model: model, [""]),
        (["head.0", 1, lambda model: model.head[2]], ["1", "head.0", "head.2"]),
        (("head.0", ["head.2"]), ["head.0", "head.2"]),
        ("head.*", ["head.0", "head.1", "head.2"]),
        (nn.Tanh, ["head.1"]),
        (r"body.a\/b", ["body.a%2Fb"]),
        ("body.x[0]", ["body.x%5B0%5D"]),
        (["head", "head", 1], ["head"]),
    ],
)
def test_a_layer_is_named_by_index_name_object_or_a_list_of_them(folder, layer, labels):
    model = Nest()

    def given(item):
        if isinstance(item, (list, tuple)):
            return type(item)(given(inner) for inner in item)
        return item(model) if callable(item) and not isinstance(item, type) else item

    register(Hooks(model, given(layer)), "fph", visualize=True)
    register(Hooks(model), "fbph", visualize=True, layer=given(layer))
    outcomes(model, row_batches(4))
    for word, ending in (("inputs", "forward_prehook"), ("grad_output", "full_backward_prehook")):
        found = [name for name in saved_names(folder) if name.startswith(word)]
        start = f"{word}_0_batch_size_4_layer_"
        assert sorted(found) == sorted(f"{start}{label}_{ending}_tensor.pt" for label in labels)


def test_several_layers_in_one_instance_each_count_for_themselves(folder):
    model = Nest()
    handle = register(Hooks(model, ["head.0", "head.2"]), "fh", visualize=True)
    with hl.capture(model, "head.0", "head.2") as record:
        model(*row_batches(4))
        model.head[2](torch.ones(1, 3))
    handle.remove()
    files = {name.rpartition("/")[2]: value for name, value in saved_files(folder).items()}
    assert len(files) == 6
    for name, place, call in (
        ("output_0_batch_size_4_layer_head.0", "head.0", 0),
        ("output_0_batch_size_4_layer_head.2", "head.2", 0),
        ("output_1_batch_size_1_layer_head.2", "head.2", 1),
    ):
        assert torch.equal(files[f"{name}_forward_hook_tensor.pt"], record[place, call])
    assert_clean(model)


def test_one_update_acts_at_several_layers_and_one_handle_ends_it():
    model = Nest()
    (x,) = row_batches(4)
    before = model(x)
    handle = register(Hooks(model, ["body.*", 1]), "fh", noise=0.0)
    with hl.capture(model, "body.*", "head") as record:
        model(x)
    assert not any(value.any() for _, value in record.items())
    assert len(record) == 3
    handle.remove()
    assert torch.equal(model(x), before)
    assert_clean(model)


def test_different_layers_of_one_instance_can_have_different_updates():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    hooks = Hooks(model)
    register(hooks, "fh", noise=2.0, layer=0)
    register(hooks, "fh", noise=5.0, layer="1")
    with hl.capture(model, "0", "1") as record:
        model(torch.ones(1))
    assert (record["0"].item(), record["1"].item()) == (2.0, 10.0)


# -- update and visualize together ----------------------------------------------------------------


@pytest.mark.parametrize("kind", HOOK_KINDS)
def test_with_an_update_the_values_before_it_are_saved(folder, kind):
    model = perceptron()
    hooks = Hooks(model, 2)
    bare = outcomes(model, row_batches(4))
    with register(hooks, kind, visualize=True):
        outcomes(model, row_batches(4))
    with register(hooks, kind, noise=-3.0):
        expected = outcomes(model, row_batches(4))
    with register(hooks, kind, visualize=True, noise=-3.0):
        found = outcomes(model, row_batches(4))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(found, bare, strict=True))
    files = saved_files(folder)
    assert files
    for name, value in files.items():
        assert torch.equal(value, files[name.replace("_1_batch_", "_0_batch_")])
    assert_clean(model)


@pytest.mark.parametrize("kind", HOOK_KINDS)
def test_looking_changes_nothing_bit_for_bit(kind):
    model = perceptron()
    before = outcomes(model, row_batches(8, 3))
    handle = register(Hooks(model, [0, 2, "3"]), kind, visualize=True)
    during = outcomes(model, row_batches(8, 3))
    handle.remove()
    after = outcomes(model, row_batches(8, 3))
    for one, two, three in zip(before, during, after, strict=True):
        assert torch.equal(bits(one), bits(two))
        assert torch.equal(bits(one), bits(three))
    assert_clean(model)


# -- shapes ---------------------------------------------------------------------------------------


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.norm = nn.LayerNorm(6)
        self.block = nn.Sequential(nn.Conv1d(4, 5, 3), nn.BatchNorm1d(5), nn.Dropout(0.5))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.lstm = nn.LSTM(4, 3, batch_first=True)
        self.flatten = nn.Flatten()
        self.layers = nn.ModuleList([nn.Linear(15, 2)])

    def forward(self, words, mask=None):
        x = self.block(self.norm(self.embedding(words)))
        x = self.attention(x.transpose(1, 2)[..., :4], x.transpose(1, 2)[..., :4],
                           value=x.transpose(1, 2)[..., :4])[0]  # fmt: skip
        return self.layers[0](nn.functional.pad(self.flatten(self.lstm(x)[0]), (0, 3)))


WORDS_BATCH = torch.zeros(7, 4, dtype=torch.long)


@pytest.mark.parametrize(
    ("layer", "shapes"),
    [
        ("embedding", ((4,), (4, 6))),
        ("norm", ((4, 6), (4, 6))),
        ("block", ((4, 6), (5, 4))),
        ("block.0", ((4, 6), (5, 4))),
        ("block.1", ((5, 4), (5, 4))),
        ("attention", ((4, 4), ((4, 4), (4, 4)))),
        ("lstm", ((4, 4), ((4, 3), ((7, 3), (7, 3))))),
        ("flatten", ((4, 3), (12,))),
        ("layers.0", (15, 2)),
        ("", ((4,), (2,))),
        (0, ((4,), (4, 6))),
    ],
)
@pytest.mark.parametrize(
    "batch", [WORDS_BATCH, (WORDS_BATCH,), [WORDS_BATCH, None], {"words": WORDS_BATCH}]
)
def test_the_shape_of_any_layer_is_seen_in_a_run(layer, shapes, batch):
    model = Reader()
    assert Hooks(model, layer).get_shape_of_layer(batch) == shapes
    assert Hooks(model).get_shape_of_layer(batch=batch, layer=layer) == shapes
    assert_clean(model)


@pytest.mark.parametrize("kind", HOOK_KINDS)
@pytest.mark.parametrize("layer", [0, 2])
def test_the_shapes_are_those_that_new_values_need(kind, layer):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(36, 5), nn.Linear(5, 2))
    x = torch.zeros(2, 1, 5, 5, requires_grad=True)
    hooks = Hooks(model, layer)
    shape = hooks.get_shape_of_layer(x)[CHANGED[kind] == "output"]
    values = torch.randn(2, shape) if layer == 2 else torch.randn(2, *shape)
    register(hooks, kind, values=values)
    port = PORTS[kind]
    with hl.capture(model, f"{layer}{port}") as record:
        weigh(model(x)).backward()
    assert torch.equal(record[f"{layer}{port}"], values)


def test_a_run_for_a_shape_leaves_no_trace(folder):
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5), nn.ReLU(), nn.Flatten()
    )
    model[0].eval()
    hooks = Hooks(model, 3)
    for kind in HOOK_KINDS:
        register(hooks, kind, visualize=True)
    register(hooks, "fh", values=torch.ones(9, 9))  # would not fit
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    x = torch.randn(2, 1, 5, 5)
    random_state = torch.get_rng_state()
    assert hooks.get_shape_of_layer(x) == ((2, 3, 3), (2, 3, 3))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert saved_names(folder) == []
    with pytest.raises(hl.ChangeError):
        model(x)  # the update acts again


def test_the_shape_of_a_layer_that_is_called_twice_is_that_of_its_first_call():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tanh = nn.Tanh()

        def forward(self, x):
            assert not torch.is_grad_enabled()
            return self.tanh(self.tanh(x)[:, :1])

    assert Hooks(Model(), 0).get_shape_of_layer(torch.ones(2, 3)) == ((3,), (3,))


def test_a_layer_with_features_of_its_own_tells_them():
    class Custom(nn.Module):
        in_features, out_features = 5, 6

    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential())
    model[1].add_module("custom", Custom())
    assert Hooks(model, 0).get_shape_of_layer(torch.ones(1, 2)) == (2, 3)
    with pytest.raises(hl.NotHookable):
        Hooks(model, "1.custom")


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", HOOK_KINDS)
def test_neither_update_nor_visualize_is_an_error(kind):
    model = perceptron()
    with pytest.raises(hl.ChangeError) as caught:
        getattr(Hooks(model, 2), f"register_{kind}")()
    assert str(caught.value) == (
        f"register_{kind} was called with neither update nor visualize. It would do nothing. "
        "Give visualize=True to save the values, update=True to change them, or both."
    )
    assert isinstance(caught.value, ValueError)
    assert_clean(model)


@pytest.mark.parametrize("kind", HOOK_KINDS)
def test_an_update_without_noise_and_values_is_an_error(kind):
    model, word = perceptron(), CHANGED[kind]
    method = getattr(Hooks(model, 2), f"register_{kind}")
    message = (
        rf"register_{kind} .* neither noise nor new values .* add_noise_{word}=True with noise"
    )
    for given in ({}, {f"noise_{word}": 2.0}, {f"add_noise_{word}": True}):
        with pytest.raises(hl.ChangeError, match=message):
            method(update=True, visualize=True, **given)
    assert_clean(model)


def test_what_is_not_switched_on_is_left_out():
    model = nn.Sequential(nn.Identity())
    Hooks(model, 0).register_fh(
        update=True, add_noise_output=True, noise_output=2.0, new_values_output=torch.zeros(3)
    )
    assert torch.equal(model(torch.ones(3)), torch.full((3,), 2.0))


@pytest.mark.parametrize("wrong", ["values", "noise", "batch"])
@pytest.mark.parametrize("kind", HOOK_KINDS)
def test_a_wrong_shape_is_an_error_that_shows_both_sides(kind, wrong):
    model = perceptron()
    features = 5 if CHANGED[kind] == "output" else 4
    given = {
        "values": {"values": torch.ones(8, 9)},
        "noise": {"noise": torch.ones(8, 9)},
        "batch": {"values": torch.ones(7, features)},
    }[wrong]
    shape = (7, features) if wrong == "batch" else (8, 9)
    handle = register(Hooks(model, 2), kind, **given)
    with pytest.raises(hl.ChangeError) as caught:
        outcomes(model, row_batches(8))
    assert f"{shape}" in caught.value.found
    assert f"{(8, features)}" in caught.value.found
    assert caught.value.remedy
    port = PORTS[kind]
    assert any(repr(f"2{port}") in note for note in caught.value.__notes__)
    handle.remove()
    outcomes(model, row_batches(8))
    assert_clean(model)


def test_an_update_of_the_gradient_before_an_in_place_layer_is_an_error():
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(inplace=True))
    register(Hooks(model, 1), "fbh", noise=2.0)
    with pytest.raises(hl.GradientNotAvailable, match=r"'1:grad_input' .* input in place"):
        model(*row_batches(2))


def test_noise_for_whole_numbers_is_an_error():
    model = nn.Sequential(nn.Embedding(3, 2))
    register(Hooks(model, 0), "fph", noise=0.5)
    with pytest.raises(hl.ChangeError, match=r"int64"):
        model(torch.tensor([1, 2]))


def test_an_update_of_what_is_no_tensor_is_an_error():
    class Name(nn.Module):
        def forward(self, text):
            return text.upper()

    model = nn.Sequential(Name())
    register(Hooks(model, 0), "fh", noise=0.5)
    with pytest.raises(
        hl.ChangeError, match=r"An update of '0' was asked for\. It holds no tensors"
    ):
        model("a")


@pytest.mark.parametrize("index", [5, -6, 100])
def test_an_index_beyond_the_children_is_an_error(index):
    model = perceptron()
    message = f"Layer {index} was asked for. The model has 5 children, counted from 0."
    for act in (lambda: Hooks(model, index), lambda: Hooks(model, [0, index]),
                lambda: Hooks(model).register_fh(visualize=True, layer=index)):  # fmt: skip
        with pytest.raises(hl.PlaceNotFound) as caught:
            act()
        assert str(caught.value).startswith(message)
        assert isinstance(caught.value, LookupError)
    assert_clean(model)


def test_a_name_that_is_not_there_is_an_error():
    with pytest.raises(hl.PlaceNotFound, match=r"'haed'.*Closest: 'head'"):
        Hooks(Nest(), "haed")


def test_a_container_without_a_forward_is_an_error():
    with pytest.raises(hl.NotHookable, match="ModuleDict"):
        Hooks(Nest(), 0)


@pytest.mark.parametrize("place", ["head:input", "head.0.weight", "head[0]"])
def test_a_place_of_a_value_is_no_layer(place):
    with pytest.raises(hl.PlaceError, match=r"was given as a layer\. The place .* of a value"):
        Hooks(Nest(), place)


def test_without_a_layer_nothing_can_be_registered():
    with pytest.raises(hl.PlaceError, match=r"No layer was named\. .* Hooks\(model, 'fc'\)"):
        Hooks(perceptron()).register_fh(visualize=True)
    with pytest.raises(hl.PlaceError, match=r"No layer was named\."):
        Hooks(perceptron()).get_shape_of_layer()


def test_the_shape_of_several_layers_is_an_error():
    with pytest.raises(hl.PlaceError, match=r"There are 2 layers: '0', '2'\. Name one"):
        Hooks(perceptron(), [0, 2]).get_shape_of_layer()


def test_a_shape_that_needs_a_run_asks_for_a_batch():
    model = nn.Sequential(nn.Conv2d(1, 2, 3))
    with pytest.raises(
        hl.NotCaptured, match=r"layer '0' .* a Conv2d: .* get_shape_of_layer\(batch\)"
    ):
        Hooks(model, 0).get_shape_of_layer()


def test_a_shape_of_a_layer_that_does_not_run_is_an_error():
    model = nn.Sequential(nn.Identity())
    model.add_module("idle", nn.Sequential(nn.Tanh()))
    model.forward = model[0].forward
    with pytest.raises(hl.NeverFired, match="'idle"):
        Hooks(model, "idle").get_shape_of_layer(torch.ones(1))
    assert_clean(model)


def test_a_registration_that_fails_half_way_leaves_nothing_behind(monkeypatch):
    model = perceptron()
    attach = hl.edit.attach

    def fail(self):
        attach(self)
        if len(hl.attached(model)) > 3:
            raise MemoryError("on purpose")

    monkeypatch.setattr(hl.edit, "attach", fail)
    hooks = Hooks(model, [0, 2])
    with pytest.raises(MemoryError):
        register(hooks, "fh", visualize=True, noise=2.0)
    assert_clean(model)


def test_a_handle_tells_what_it_is():
    handle = register(Hooks(perceptron(), 0), "fbph", visualize=True)
    assert repr(handle) == "<handle of register_fbph, live>"
    handle.remove()
    assert repr(handle) == "<handle of register_fbph, removed>"
