"""Every container in and out: walked, captured, edited, rebuilt with its own type."""

import dataclasses
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import Giving
from oracles import assert_clean, work_of
from torch import Tensor, nn
from torch.distributions import (
    Bernoulli,
    Categorical,
    Independent,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    TransformedDistribution,
)
from torch.distributions.transforms import ExpTransform
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import hookline as hl
from hookline.values.nested import get_part, leaves, map_leaves, set_part, show_path

X = torch.tensor([1.0, 2.0, 3.0])


# -- the containers -------------------------------------------------------------------------------

Point = namedtuple("Point", "a b")


class Stamped(namedtuple("Base", "a b")):  # noqa: SLOT002 - as people write them
    """A named tuple with a constructor of its own."""

    def __new__(cls, a):
        return super().__new__(cls, a, "stamp")


class TupleOfTwo(tuple):  # noqa: SLOT001 - as people write them
    def __new__(cls, a, b):
        return super().__new__(cls, (a, b))


class Row(list):
    def __init__(self, a, b):
        super().__init__([a, b])
        self.note = "kept"


class Attributed(dict):
    """A dict that is read by attribute, as many configurations are."""

    __getattr__ = dict.__getitem__


class Needy(OrderedDict):
    """Cannot be made without an argument."""

    def __init__(self, a):
        super().__init__()
        self["a"] = a


class User(UserDict):
    def __init__(self, a, note):
        super().__init__(a=a)
        self.note = note


class ReadOnly(Mapping):
    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class Locked(ReadOnly):
    """Can be written to, and refuses to be copied."""

    def __setitem__(self, key, value):
        self._items[key] = value

    def __reduce_ex__(self, protocol):
        raise TypeError("no copies")


@dataclasses.dataclass
class Plain:
    a: object
    b: object = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: object
    b: object = None


@dataclasses.dataclass(slots=True)
class Slotted:
    a: object
    b: object = None


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    a: object
    b: object = None


@dataclasses.dataclass
class Checked:
    """Its constructor takes what it does not keep, and would compute `a` anew."""

    given: dataclasses.InitVar[Tensor]
    a: object = dataclasses.field(init=False)

    def __post_init__(self, given):
        self.a = given + 100


@dataclasses.dataclass
class ModelOutput(OrderedDict):
    """Fields that are items as well; None is left out of the items."""

    a: object = None
    b: object = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)

    def __reduce__(self):
        fields = tuple(getattr(self, field.name) for field in dataclasses.fields(self))
        return type(self), fields


@dataclasses.dataclass
class StrictOutput(OrderedDict):
    """The same with a required field, and without help for copying."""

    a: object
    b: object = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class AttrsLike:
    """As a class made by the attrs library looks from outside."""

    __attrs_attrs__ = (SimpleNamespace(name="a"), SimpleNamespace(name="b"))

    def __init__(self, a, b=None):
        self.a, self.b = a, b


def default(a):
    made = defaultdict(list)
    made["a"] = a
    return made


CONTAINERS = {
    "tuple": (lambda a: (a, None), 0),
    "list": (lambda a: [a, "text"], 0),
    "dict": (lambda a: {"a": a, "b": 3}, "a"),
    "nested": (lambda a: ({"h": [None, a]}, 1), (0, "h", 1)),
    "named tuple": (lambda a: Point(a, 1), "a"),
    "named tuple by position": (lambda a: Point(1, a), 1),
    "named tuple with a constructor": (Stamped, "a"),
    "tuple subclass": (lambda a: TupleOfTwo(a, 1), 0),
    "list subclass": (lambda a: Row(a, 1), 0),
    "dict subclass": (lambda a: Attributed(a=a), "a"),
    "OrderedDict": (lambda a: OrderedDict(a=a, b=1), "a"),
    "OrderedDict subclass": (Needy, "a"),
    "defaultdict": (default, "a"),
    "UserDict": (lambda a: User(a, "kept"), "a"),
    "ChainMap": (lambda a: ChainMap({"b": 1}, {"a": a}), "a"),
    "mappingproxy": (lambda a: MappingProxyType({"a": a}), "a"),
    "dataclass": (Plain, "a"),
    "frozen dataclass": (Frozen, "a"),
    "slotted dataclass": (Slotted, "a"),
    "frozen slotted dataclass": (FrozenSlotted, "a"),
    "dataclass with a constructor of its own": (Checked, "a"),
    "ModelOutput": (ModelOutput, "a"),
    "strict ModelOutput": (StrictOutput, "a"),
    "attrs": (AttrsLike, "a"),
    "SimpleNamespace": (lambda a: SimpleNamespace(a=a, b=1), "a"),
    "Normal": (lambda a: Normal(a, 1.0 + a.detach()), "loc"),
    "Independent": (lambda a: Independent(Normal(a, a.detach() + 1), 1), ("base_dist", "loc")),
    "Categorical": (lambda a: Categorical(logits=a), "logits"),
    "Bernoulli": (lambda a: Bernoulli(probs=a / 3), "probs"),
    "MultivariateNormal": (lambda a: MultivariateNormal(a, torch.eye(3)), "loc"),
    "MixtureSameFamily": (
        lambda a: MixtureSameFamily(Categorical(logits=X), Normal(a, X)),
        ("_component_distribution", "loc"),
    ),
    "TransformedDistribution": (
        lambda a: TransformedDistribution(Normal(a, X), [ExpTransform()]),
        ("base_dist", "loc"),
    ),
    "PackedSequence": (lambda a: pack_sequence([a, a[:2]]), "data"),
    "torch.return_types": (lambda a: torch.max(a.view(1, 3), 0), "values"),
    "torch.return_types by position": (lambda a: torch.sort(a), 0),
    "int keys": (lambda a: {7: None, 5: a}, 5),
    "str and int keys": (lambda a: {0: None, "0": a}, "0"),
    "other keys": (lambda a: {(1, 2): a, None: 2}, "(1, 2)"),
    "bool keys": (lambda a: {True: a, False: 2}, "True"),
    "hostile keys": (
        lambda a: {"a/b": 1, "x[0]": {"it's": {"a\\b\n": a}}},
        ("x[0]", "it's", "a\\b\n"),
    ),
    "empty key": (lambda a: {"": a}, ""),
}  # fmt: skip

each_container = pytest.mark.parametrize(
    ("make", "path"),
    [(make, path if isinstance(path, tuple) else (path,)) for make, path in CONTAINERS.values()],
    ids=list(CONTAINERS),
)


def tensors_by_path(value):
    return {show_path(path): tensor for path, tensor in leaves(value)}


@each_container
def test_a_container_that_comes_out_is_captured_with_its_own_type(make, path):
    value = make(X.clone())
    model = Giving(lambda: value)
    with hl.capture(model, "") as record:
        out = model()
    assert out is value
    kept = record[""]
    assert type(kept) is type(value)
    assert tensors_by_path(kept).keys() == tensors_by_path(value).keys()
    for one, other in zip(
        tensors_by_path(kept).values(), tensors_by_path(value).values(), strict=True
    ):
        assert torch.equal(one, other)
        assert one is not other
    wanted = get_part(value, path).clone()
    get_part(value, path).fill_(9)
    assert torch.equal(get_part(kept, path), wanted)
    assert torch.equal(record[str(hl.Place("", "output", path))], wanted)
    repr(record)
    assert_clean(model)


@each_container
def test_a_container_that_comes_out_attached_holds_the_very_tensors(make, path):
    value = make(X.clone().requires_grad_() * 1)
    model = Giving(lambda: value)
    with hl.capture(model, "") as record:
        model()
    assert get_part(record[""], path) is get_part(value, path)
    (gradient,) = torch.autograd.grad(get_part(value, path).sum(), get_part(record[""], path))
    assert torch.equal(gradient, torch.ones_like(gradient))
    with torch.no_grad():
        get_part(value, path).mul_(2)
    with pytest.raises(hl.ValueChanged, match="changed in place"):
        record[""]


@each_container
def test_one_part_of_a_container_that_comes_out_is_captured(make, path):
    value = make(X.clone())
    model = Giving(lambda: value)
    place = str(hl.Place("", "output", path))
    with hl.capture(model, place) as record:
        model()
    wanted = get_part(value, path).clone()
    get_part(value, path).fill_(9)
    assert torch.equal(record[place], wanted)


@each_container
def test_one_part_of_a_container_that_comes_out_is_edited(make, path):
    value = make(X.clone())
    before = {name: tensor.clone() for name, tensor in tensors_by_path(value).items()}
    model = Giving(lambda: value)
    with hl.edit(model, str(hl.Place("", "output", path)), lambda part: part + 10):
        out = model()
    assert type(out) is type(value)
    assert out is not value
    assert torch.equal(get_part(out, path), get_part(value, path) + 10)
    for name, tensor in tensors_by_path(value).items():
        assert torch.equal(tensor, before[name])
    if isinstance(out, OrderedDict) and dataclasses.is_dataclass(out):
        assert out.a is out["a"]
    if isinstance(value, (Row, User)):
        assert out.note == value.note
    assert_clean(model)


@each_container
def test_a_container_that_goes_in_is_captured_and_edited(make, path):
    seen = []
    model = Giving(lambda given: seen.append(given))
    value = make(X.clone())
    before = get_part(value, path).clone()
    place = str(hl.Place("", "input", path))
    with (
        hl.capture(model, ":input") as whole,
        hl.capture(model, place) as part,
        hl.edit(model, place, hl.scale(3.0)),
    ):
        model(value)
    assert type(seen[0]) is type(value) is type(whole[":input"])
    assert torch.equal(get_part(seen[0], path), before * 3)
    assert torch.equal(get_part(whole[":input"], path), before)
    assert torch.equal(part[place], before)
    assert torch.equal(get_part(value, path), before)
    assert_clean(model)


# -- what only some of them do --------------------------------------------------------------------


def test_a_rebuilt_distribution_works():
    model = Giving(lambda x: Normal(x, torch.ones(3)))
    with hl.edit(model, "[loc]", hl.add(2.0)):
        made = model(X)
    assert torch.equal(made.mean, X + 2)
    assert torch.equal(made.log_prob(X), Normal(X + 2, torch.ones(3)).log_prob(X))


def test_an_edited_categorical_samples_what_its_new_logits_say():
    model = Giving(lambda: Categorical(logits=torch.zeros(3)))
    with hl.edit(model, "[logits]", lambda logits: torch.tensor([-100.0, 100.0, -100.0])):
        made = model()
    assert made.sample().item() == 1
    assert made.probs[1] == 1


def test_a_rebuilt_packed_sequence_runs_through_an_lstm():
    packed = pack_sequence([torch.ones(4, 3), torch.ones(2, 3)])
    lstm = nn.LSTM(3, 2)
    with hl.edit(lstm, ":input[data]", hl.scale(2.0)), hl.capture(lstm, "[0][data]") as record:
        out, _ = lstm(packed)
    expected, _ = lstm(PackedSequence(packed.data * 2, packed.batch_sizes))
    assert isinstance(out, PackedSequence)
    assert torch.equal(out.data, expected.data)
    assert record["[0][data]"] is out.data
    assert_clean(lstm)


def test_a_rebuilt_default_dict_keeps_its_factory_and_grows_no_keys():
    value = default(X)
    model = Giving(lambda: value)
    with hl.capture(model, "") as record:
        model()
    assert record[""].default_factory is list
    with pytest.raises(hl.NeverFired, match=r"not .missing."), hl.capture(model, "[missing]"):
        model()
    assert list(value) == ["a"]


@pytest.mark.parametrize("kind", [ReadOnly, Locked])
def test_a_mapping_that_cannot_be_made_anew_is_kept_by_reference_and_not_edited(kind):
    value = kind({"a": X.clone()})
    tensor = value["a"]
    model = Giving(lambda: value)
    with hl.capture(model, "") as whole, hl.capture(model, "[a]") as part:
        assert model() is value
    assert whole[""] is value
    assert value["a"] is tensor
    value["a"].fill_(9)
    assert torch.equal(part["[a]"], X)
    with pytest.raises(hl.PlaceError, match=rf"{kind.__name__}.*cannot be made anew"):
        with hl.edit(model, "[a]", hl.zero()):
            model()
    assert_clean(model)


@pytest.mark.parametrize(
    "value",
    [None, 3, "text", b"raw", 2.5, X.size(), torch.float32, range(3), (), [], {}, Counter()],
)
def test_what_holds_no_tensor_is_kept_as_it_is(value):
    model = Giving(lambda: value)
    with hl.capture(model, "") as record:
        assert model() is value
    assert record[""] == value
    assert type(record[""]) is type(value)
    with pytest.raises(hl.SeveralTensors, match="holds none"):
        record.tensor("")
    repr(record)
    assert_clean(model)


def test_the_same_tensor_twice_stays_the_same_tensor_twice():
    model = Giving(lambda: [X, {"again": X}])
    with hl.capture(model, "") as record:
        model()
    assert record[""][0] is record[""][1]["again"]
    with hl.edit(model, "[0]", hl.scale(2.0)):
        first, second = model()
    assert torch.equal(first, X * 2)
    assert second["again"] is X


@pytest.mark.parametrize("kind", ["list", "dict", "dataclass"])
def test_a_structure_that_holds_itself_is_captured_and_stays_as_it_was(kind):
    x = X.clone()
    value = {"list": [x], "dict": {"a": x}, "dataclass": Plain(x)}[kind]
    if kind == "list":
        value.append(value)
    elif kind == "dict":
        value["b"] = value
    else:
        value.b = value
    place, inside = ("[0]", (1, 0)) if kind == "list" else ("[a]", ("b", "a"))
    model = Giving(lambda: value)
    with hl.capture(model, "") as record, hl.edit(model, place, hl.scale(2.0)):
        model()
    repr(record)
    x.fill_(9)
    assert torch.equal(record[""][0] if kind == "list" else record["[a]"], X)
    assert torch.equal(get_part(record[""], inside), X)
    assert_clean(model)


def test_a_structure_of_many_levels_is_no_trouble():
    value = X
    for _ in range(2000):
        value = [value]
    model = Giving(lambda: value)
    with hl.capture(model, "") as record:
        assert model() is value
    repr(record)
    kept = record[""]
    for _ in range(2000):
        (kept,) = kept
    assert torch.equal(kept, X)


def test_a_shared_structure_is_not_walked_along_every_path():
    counts = []
    for depth in (6, 12):
        value = [X.clone().requires_grad_() * 1]
        for _ in range(depth):
            value = [value, value]
        model = Giving(lambda value=value: value)
        with hl.capture(model, "") as record:
            counts.append(work_of(model))
        kept = record[""]
        for _ in range(depth):
            assert kept[0] is kept[1]
            kept = kept[0]
    assert counts[1] < 4 * counts[0]


def test_a_list_that_grows_later_does_not_change_what_was_captured():
    value = [X]
    model = Giving(lambda: value)
    with hl.capture(model, "") as record:
        model()
    value.append(X)
    assert len(record[""]) == 1


# -- opaque objects -------------------------------------------------------------------------------


class Cache:
    """An object of its own kind, as the caches of language models are."""

    def __init__(self) -> None:
        self.keys = X.clone()
        self.layers = [X * 2]

    @property
    def total(self) -> Tensor:
        return self.keys.sum()


def test_an_opaque_object_is_kept_by_reference_and_the_table_says_so():
    cache = Cache()
    model = Giving(lambda: (X, cache))
    with hl.capture(model, "") as whole, hl.capture(model, "[1]") as record:
        model()
    assert whole[""][1] is cache is record["[1]"]
    assert "kept by reference" in repr(record)


def test_an_attribute_of_an_opaque_object_is_a_part_that_stays_as_it_was():
    cache = Cache()
    model = Giving(lambda: (X, cache))
    with hl.capture(model, "[1][keys]", "[1][layers][0]", "[1][total]") as record:
        model()
    cache.keys.fill_(0)
    cache.layers[0].fill_(0)
    assert torch.equal(record["[1][keys]"], X)
    assert torch.equal(record["[1][layers][0]"], X * 2)
    assert record["[1][total]"] == X.sum()


def test_an_attribute_of_an_opaque_object_is_edited_on_a_copy_of_it():
    cache = Cache()
    model = Giving(lambda: (X, cache))
    with hl.edit(model, {"[1][keys]": hl.scale(2.0), "[1][layers][0]": hl.zero()}):
        _, out = model()
    assert type(out) is Cache
    assert torch.equal(out.keys, X * 2)
    assert torch.equal(out.layers[0], torch.zeros(3))
    assert torch.equal(cache.keys, X)
    assert torch.equal(cache.layers[0], X * 2)


def test_an_attribute_of_a_container_is_read_and_an_edit_of_it_is_refused():
    value = Row(X.clone(), 1)
    value.note = X * 2
    model = Giving(lambda: value)
    with hl.capture(model, "[note]") as record:
        model()
    assert torch.equal(record["[note]"], X * 2)
    with pytest.raises(hl.PlaceError, match=r"\[note\] of a Row.*cannot be made anew"):
        with hl.edit(model, "[note]", hl.zero()):
            model()
    assert_clean(model)


def test_an_attribute_that_cannot_be_set_is_refused_with_its_place():
    model = Giving(lambda: Cache())
    with pytest.raises(hl.HooklineError, match="total"):
        with hl.edit(model, "[total]", hl.zero()):
            model()
    assert_clean(model)


def test_a_ready_change_on_an_opaque_object_asks_for_the_attribute():
    model = Giving(lambda: Cache())
    with pytest.raises(
        hl.SeveralTensors, match=r"It is a Cache and holds none.*[Nn]ame.*block.keys"
    ):
        with hl.edit(model, "", hl.zero()):
            model()
    assert_clean(model)


def test_a_deque_stays_as_it_was_or_is_said_to_be_a_reference():
    value = deque([X.clone()], maxlen=3)
    model = Giving(lambda: value)
    with hl.capture(model, "") as record:
        model()
    value[0].fill_(9)
    assert "kept by reference" in repr(record) or torch.equal(record[""][0], X)


# -- parts that are not there ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "place", "reason"),
    [
        (X, "[0]", "a tensor of shape .3,., and a part never indexes a tensor"),
        (X, "[shape]", "a part never indexes a tensor"),
        ((X, X), "[2]", r"is a tuple, (which has|with) \[0\], \[1\], not \[2\]"),
        ((X, {"h": X}), "[1][g]", r"\[1\] is a dict, (which has|with) \[h\], not \[g\]"),
        ((X, {"h": X}), "[1][h][0]", r"\[1\]\[h\] is a tensor"),
        ({"a": X}, "[values]", r"(which has|with) \[a\], not \[values\]"),
        ({"a": X}, "[items]", r"(which has|with) \[a\], not \[items\]"),
        (lambda: Attributed(a=X), "[b]", r"is a Attributed, (which has|with) \[a\], not \[b\]"),
        ([X], "[append]", r"(which has|with) \[0\], not \[append\]"),
        (Point(X, 1), "[count]", r"(which has|with) \[a\], \[b\], not \[count\]"),
        (None, "[0]", "is a NoneType, (which has|with) no parts"),
        (Plain(X), "[c]", r"is a Plain, (which has|with) \[a\], \[b\], not \[c\]"),
        (Cache(), "[values]", "is a Cache, (which has|with) no parts, not"),
    ],
)
def test_a_part_that_is_not_there_is_told_with_those_that_are(value, place, reason):
    model = Giving(value if callable(value) else lambda: value)
    with pytest.raises(hl.NeverFired, match=reason):
        with hl.capture(model, place):
            model()
    with pytest.raises(hl.PlaceError, match=reason):
        with hl.edit(model, place, hl.zero()):
            model()
    assert_clean(model)


def test_a_ready_change_lists_the_parts_of_a_value_with_several_tensors():
    lstm = nn.LSTM(3, 2)
    with pytest.raises(hl.SeveralTensors, match=r"holds 3: \[0\] .*, \[1\]\[0\] .*, \[1\]\[1\]"):
        with hl.edit(lstm, "", hl.zero()):
            lstm(torch.ones(1, 3))
    with hl.edit(lstm, "[1][0]", hl.zero()):
        _, (h, c) = lstm(torch.ones(1, 3))
    assert not h.any()
    assert c.any()
    assert_clean(lstm)


def test_a_ready_change_finds_the_only_tensor_in_a_structure():
    model = Giving(lambda: (None, {"h": X, "n": 3}))
    with hl.edit(model, "", hl.scale(2.0)):
        assert torch.equal(model()[1]["h"], X * 2)


@pytest.mark.parametrize(
    "change", [lambda v: (v[0],), lambda v: [*v], lambda v: v[0], lambda v: (v[0][:1], v[1])]
)
def test_a_function_that_returns_another_structure_is_refused(change):
    model = Giving(lambda: (X, {"h": X}))
    given = change((X, {"h": X}))
    fits = isinstance(given, list)  # a list with the same parts is taken
    if fits:
        with hl.edit(model, "", change):
            assert isinstance(model(), list)
    else:
        with pytest.raises(hl.ChangeError, match=r"given a tuple.*returned|was \(3,\).*\(1,\)"):
            with hl.edit(model, "", change):
                model()
    assert_clean(model)


# -- the functions --------------------------------------------------------------------------------

keys = st.integers(-5, 5) | st.text(max_size=4)
structures = st.recursive(
    st.builds(lambda n: torch.full((2,), float(n)), st.integers(0, 9)) | st.none() | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.builds(Plain, inner, inner)
        | st.builds(Point, inner, inner)
        | st.builds(lambda a, b: SimpleNamespace(a=a, b=b), inner, inner)
    ),
    max_leaves=8,
)


class ShownAsNamed:
    def __str__(self):
        return "named"


def test_keys_that_have_the_same_text_are_different_parts():
    first, second = ShownAsNamed(), ShownAsNamed()
    keys = [None, "None", 7, "7", (0, 1), "(0, 1)", first, second]

    class Keyed(nn.Module):
        def forward(self, x):
            return {key: x * n for n, key in enumerate(keys, 1)}

    model = nn.Sequential(Keyed())
    x = torch.ones(2, requires_grad=True)
    with hl.capture(model, "0", "0:grad_output") as record:
        output = model(x)
        sum(value.sum() * n for n, value in enumerate(output.values())).backward()
    assert [value[0].item() for value in record["0:grad_output"].values()] == [*range(len(keys))]
    paths = [path for path, _ in leaves(record["0"])]
    assert paths == [
        ("None at 0",), ("None",), (7,), ("7",), ("(0, 1) at 4",), ("(0, 1)",), ("named at 6",),
        ("named at 7",),
    ]  # fmt: skip
    for n, path in enumerate(paths):
        place = "0" + show_path(path)
        assert record[place] is output[keys[n]]
        with hl.edit(model, place, hl.add(100.0)):
            edited = model(x)
        for key in keys:
            assert torch.equal(edited[key], output[key] + (100.0 if key is keys[n] else 0.0)), key
    assert_clean(model)


def same_structure(one, other):
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same_structure(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_structure, one, other))
    if isinstance(one, (Plain, SimpleNamespace)):
        return same_structure(vars(one), vars(other))
    return one == other


@given(structures)
@settings(max_examples=150, deadline=None)
def test_every_leaf_is_at_its_path_and_can_be_replaced_there(value):
    assert same_structure(map_leaves(lambda leaf: leaf, value), value)
    for path, tensor in leaves(value):
        assert get_part(value, path) is tensor
        changed = set_part(value, path, tensor + 1)
        assert torch.equal(get_part(changed, path), tensor + 1)
        assert same_structure(set_part(changed, path, tensor), value)


@example({-1: torch.zeros(2)})
@given(structures)
@settings(max_examples=75, deadline=None)
def test_any_structure_goes_through_a_capture_unchanged(value):
    model = Giving(lambda given: given)
    with hl.capture(model, "", ":input", ":inputs") as record:
        assert model(value) is value
    assert same_structure(record[""], value)
    assert same_structure(record[":input"], value)
    repr(record)
    for path, tensor in leaves(value):
        assert torch.equal(record[str(hl.Place("", "output", path))], tensor)
    assert_clean(model)
