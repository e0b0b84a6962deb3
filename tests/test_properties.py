"""Properties over random models: looking changes nothing, and sees what hand-written hooks see.

A model is a random tree of modules. Values between them are random structures: tensors, tuples,
dicts, dataclasses, named tuples, with None and numbers in them. Modules may write in place, be
shared, pass their input on, return views of it, keep residuals, and be called several times.
"""

import itertools
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import assert_clean
from torch import nn

import hookline as hl

settings.register_profile(
    "same", derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
many = settings(settings.get_profile("same"), max_examples=100)
some = settings(settings.get_profile("same"), max_examples=40)
WIDTH = 3
# torch.manual_seed formats a stack each time, for devices that it may meet later: most of the time.
seed = torch.default_generator.manual_seed

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Out:
    hidden: Any
    extra: Any = None


class Keyed(dict):
    """A subclass of dict, as many libraries return."""


# -- structures ---------------------------------------------------------------------------------

WRAPS = {
    "tensor": lambda a, b: a + b,
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, None, b],
    "nested": lambda a, b: (None, {"deep": [a, "text"]}, (b, 3)),
    "dict": lambda a, b: {"a": a, "n": 1, "b": b},
    "keyed": lambda a, b: Keyed(a=a, b=b),
    "point": lambda a, b: Point(a, b),
    "data": lambda a, b: Out(a, {"b": b}),
    "one": lambda a, b: {"only": a * b},
    "twice": lambda a, b: (a, a, b),
}


def tensors(value):
    """Every tensor of a structure, in order; the oracle has a traversal of its own."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors(item)]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors(item)]
    if isinstance(value, Out):
        return tensors(value.hidden) + tensors(value.extra)
    return []


def total(value):
    """One tensor from a structure."""
    found = tensors(value)
    return found[0] if len(found) == 1 else torch.stack([t * 1 for t in found]).sum(0)


def frozen(value):
    """What an eager hook keeps: the kinds of the containers, and clones of the tensors."""
    return shape_of(value), [t.detach().clone() for t in tensors(value)]


def shape_of(value):
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, dict):
        return type(value), {key: shape_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [shape_of(item) for item in value]
    if isinstance(value, Out):
        return Out, shape_of(value.hidden), shape_of(value.extra)
    return value


# -- modules ------------------------------------------------------------------------------------


class Wrap(nn.Module):
    """Turns whatever comes into a structure."""

    def __init__(self, kind):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, value):
        x = total(value)
        return WRAPS[self.kind](self.linear(x), x * 0.5)


class WritesInPlace(nn.Module):
    """Writes into what it was given or made, in one of several ways."""

    def __init__(self, kind):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.relu = nn.ReLU(inplace=True)
        self.kind = kind

    def forward(self, value):
        x = total(value)
        if self.kind == "after":
            return self.linear(x).mul_(2).add_(1)
        if self.kind == "relu":
            return self.relu(self.linear(x))
        if self.kind == "slice":
            y = self.linear(x) * 1
            y[:, :1] = y[:, :1] * 3
            return y
        y = x * 1  # not the input itself: another module may need it for its backward
        return self.relu(y.mul_(1.5)) + x


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, value):
        return total(value) + total(self.inner(value))


class Chain(nn.Module):
    def __init__(self, *steps):
        super().__init__()
        self.steps = nn.ModuleList(steps)

    def forward(self, value, scale=None, *, shift=0.0):
        for step in self.steps:
            value = step(value)
        if scale is None and shift == 0.0:
            return value
        return total(value) * (1.0 if scale is None else scale) + shift


class Arguments(nn.Module):
    """Calls its child with arguments by position and by name."""

    def __init__(self, inner):
        super().__init__()
        self.inner = Chain(inner)

    def forward(self, value):
        x = total(value)
        return self.inner(value, scale=x.detach().abs().mean(), shift=0.5)


class Twice(nn.Module):
    """Calls its child twice, and may skip another."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        return self.inner((total(self.inner(value)), None))


LEAVES = {
    "linear": lambda: Chain(Total(), nn.Linear(WIDTH, WIDTH)),
    "tanh": lambda: Chain(Total(), nn.Tanh()),
    "identity": nn.Identity,
    "dropout": lambda: Chain(Total(), nn.Dropout(0.5).eval()),
    "norm": lambda: Chain(Total(), nn.LayerNorm(WIDTH)),
    "view": lambda: Chain(Total(), View()),
    "buffer": lambda: Chain(Total(), nn.BatchNorm1d(WIDTH)),
}


class Total(nn.Module):
    def forward(self, value):
        return total(value)


class View(nn.Module):
    def forward(self, x):
        return x.view(-1).view(-1, WIDTH)


def build_plan(plan, shared):
    kind, *rest = plan
    if kind == "leaf":
        return LEAVES[rest[0]]()
    if kind == "wrap":
        return Wrap(rest[0])
    if kind == "in place":
        return WritesInPlace(rest[0])
    if kind == "shared":
        return shared
    inner = [build_plan(p, shared) for p in rest[0]]
    if kind == "chain":
        return Chain(*inner)
    return {"residual": Residual, "arguments": Arguments, "twice": Twice}[kind](Chain(*inner))


plans = st.recursive(
    st.one_of(
        st.tuples(st.just("leaf"), st.sampled_from(sorted(LEAVES))),
        st.tuples(st.just("wrap"), st.sampled_from(sorted(WRAPS))),
        st.tuples(st.just("in place"), st.sampled_from(["after", "relu", "slice", "own"])),
        st.tuples(st.just("shared")),
    ),
    lambda inner: st.tuples(
        st.sampled_from(["chain", "residual", "arguments", "twice"]),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=7,
)
models = st.tuples(st.lists(plans, min_size=1, max_size=4), st.sampled_from(sorted(WRAPS)))


def make_of_plan(plan):
    """A model of a plan, the same each time."""
    seed(0)
    steps, kind = plan
    shared = Wrap(kind)
    return Chain(Wrap("tuple"), *[build_plan(step, shared) for step in steps])


def wrapped_data(kind="tuple", grad=False):
    seed(1)
    a, b = torch.randn(2, WIDTH), torch.randn(2, WIDTH)
    if grad:
        a.requires_grad_()
    return a, WRAPS[kind](a, b)


def results_of(model, grad):
    """The outputs and all gradients of a model, and its buffers afterwards."""
    seed(2)
    a, value = wrapped_data(grad=grad)
    with torch.set_grad_enabled(grad):
        output = model(value)
    results = [frozen(output)]
    if grad:
        total(output).pow(2).sum().backward()
        results.append([a.grad, *[p.grad for p in model.parameters()]])
    results.append([buffer.clone() for buffer in model.buffers()])
    return results


def same_results(one, other):
    """Whether two results are bit-identical."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, (list, tuple)) and one and not isinstance(one[0], type):
        return len(one) == len(other) and all(map(same_results, one, other))
    return one == other


class Watching:
    """Hand-written hooks on every module that has a forward: eager clones, by name and call."""

    def __init__(self, model):
        self.inputs, self.outputs, self.handles = {}, {}, []
        for name, module in model.named_modules():
            if isinstance(module, nn.ModuleList):
                continue
            self.handles += [
                module.register_forward_pre_hook(self.before(name), with_kwargs=True),
                module.register_forward_hook(self.after(name)),
            ]

    def before(self, name):
        pending = self.inputs.setdefault(name, [])
        return lambda module, args, kwargs: pending.append(
            (frozen(args[0]), {key: frozen(item) for key, item in kwargs.items()})
        )

    def after(self, name):
        seen = self.outputs.setdefault(name, [])
        return lambda module, args, output: seen.append(frozen(output))

    def remove(self):
        for handle in self.handles:
            handle.remove()


# -- properties ---------------------------------------------------------------------------------


@many
@given(models, st.booleans())
def test_captures_equal_what_hand_written_hooks_see(plan, detach):
    model = make_of_plan(plan)
    watching = Watching(model)
    results_of(model, grad=detach)
    watching.remove()
    model = make_of_plan(plan)
    with hl.capture(model, "", "**", ":input", "**:input", "**:inputs", detach=True) as record:
        results_of(model, grad=detach)
    for name, expected in watching.outputs.items():
        if not expected:
            assert hl.Place(name) in record.unfired()
            continue
        assert same_results([frozen(value) for value in record.calls(hl.Place(name))], expected)
        inputs = [frozen(value) for value in record.calls(hl.Place(name, "input"))]
        assert same_results(inputs, [value for value, _ in watching.inputs[name]])
        if name:
            for value, (_, kwargs) in zip(
                record.calls(hl.Place(name, "inputs")), watching.inputs[name], strict=True
            ):
                for key, wanted in kwargs.items():
                    assert same_results(frozen(value[key]), wanted)
    assert_clean(model)


@some
@given(models, st.booleans())
def test_attached_values_read_as_they_were_or_say_that_they_changed(plan, grad):
    model = make_of_plan(plan)
    watching = Watching(model)
    results_of(model, grad)
    watching.remove()
    model = make_of_plan(plan)
    with hl.capture(model, "", "**") as record:
        results_of(model, grad)
    for place in record.places():
        for call, wanted in enumerate(watching.outputs[place.path]):
            try:
                value = record[place, call]
            except hl.ValueChanged:
                assert grad
                continue
            assert same_results(frozen(value), wanted)
    assert repr(record)
    assert record._repr_html_()


PORTS = ["", ":input", ":inputs", ":grad_output", ":grad_input", ":grad_inputs"]


@many
@given(models, st.booleans(), st.booleans())
def test_outputs_and_gradients_are_bit_identical_with_and_without_captures(plan, grad, detach):
    bare = results_of(make_of_plan(plan), grad)
    model = make_of_plan(plan)
    places = [path + port for path in ("", "**") for port in PORTS]
    with hl.capture(model, *places, "**:value", "**:grad", detach=detach):
        looked = results_of(model, grad)
    assert same_results(looked, bare)
    assert_clean(model)
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())


@some
@given(models)
def test_hooks_that_return_nothing_change_nothing(plan):
    bare = results_of(make_of_plan(plan), grad=True)
    model = make_of_plan(plan)
    seen = []
    with hl.hook(model, ["**", "**:input", "**:inputs"], lambda value: seen.append(value)):
        hooked = results_of(model, grad=True)
    assert seen
    assert same_results(hooked, bare)
    assert_clean(model)


@many
@given(models, st.sampled_from(["", ":input", ":inputs"]), st.booleans())
def test_edits_by_identity_change_nothing(plan, port, grad):
    bare = results_of(make_of_plan(plan), grad)
    model = make_of_plan(plan)
    with hl.edit(model, "**" + port, lambda value: value):
        edited = results_of(model, grad)
    assert same_results(edited, bare)
    assert_clean(model)


@some
@given(models)
def test_gradient_edits_by_identity_change_no_gradient(plan):
    bare = results_of(make_of_plan(plan), grad=True)
    model = make_of_plan(plan)
    with hl.edit(model, ["**:grad_output"], lambda grad: grad):
        edited = results_of(model, grad=True)
    assert same_results(edited[0], bare[0])
    for got, wanted in zip(edited[1], bare[1], strict=True):
        assert (got is None) == (wanted is None)
        assert got is None or torch.allclose(got, wanted, rtol=1e-4, atol=1e-6)
    assert_clean(model)


@some
@given(models, st.integers(0, 30), st.sampled_from([ValueError, KeyboardInterrupt]))
def test_an_error_at_any_moment_leaves_the_model_as_it_was(plan, moment, error):
    bare = results_of(make_of_plan(plan), grad=False)
    model = make_of_plan(plan)
    calls = itertools.count()

    def fails(value):
        if next(calls) == moment:
            raise error
        return value

    raised = False
    try:
        with hl.capture(model, "**", "**:inputs"), hl.edit(model, "**", fails):
            results_of(model, grad=False)
    except error:
        raised = True
    assert raised == (next(calls) > moment)
    assert_clean(model)
    assert same_results(results_of(make_of_plan(plan), grad=False), bare)


@some
@given(models)
def test_weight_edits_are_undone_and_their_gradients_right(plan):
    model, reference = make_of_plan(plan), make_of_plan(plan)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(0.5)
    before = [p.detach().clone() for p in model.parameters()]
    expected = results_of(reference, grad=True)
    seed(2)
    a, value = wrapped_data(grad=True)
    with hl.edit(model, "**:value", halve):
        output = model(value)
        kept = frozen(output)
    total(output).pow(2).sum().backward()
    assert same_results(kept, expected[0])
    assert same_results([a.grad, *[p.grad for p in model.parameters()]], expected[1])
    assert same_results([p.detach().clone() for p in model.parameters()], before)
    assert_clean(model)


def halve(value, call):
    name = call.place.path.rpartition(".")[2]
    return value * 0.5 if name in call.module._parameters else value


@some
@given(models, st.integers(0, 20))
def test_stopping_early_gives_the_same_value(plan, number):
    model = make_of_plan(plan)
    with hl.capture(model, "**", detach=True) as record:
        results_of(model, grad=False)
    places = record.places()
    place = places[number % len(places)]
    wanted = frozen(record.calls(place)[0])
    model = make_of_plan(plan)
    with hl.capture(model, place, stop=True, keep="first") as early:
        results_of(model, grad=False)
        pytest.fail("the block goes on")
    assert same_results(frozen(early[place]), wanted)
    assert_clean(model)
