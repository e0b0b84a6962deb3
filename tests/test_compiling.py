"""Compiled models: captures and edits are right every time, in the graph or out of it."""

import gc
import sys
import threading
import types
from importlib.machinery import ModuleSpec

import pytest
import torch
import torch._dynamo
from models import Giving
from oracles import assert_clean
from torch import nn

import hookline as hl
from hookline.torch_private import compiler_is_used
from hookline.values.nested import leaves

# torch's own, while it loads inductor
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.timeout(400)]
BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.slow)]
backends = pytest.mark.parametrize("backend", BACKENDS)
fullgraphs = pytest.mark.parametrize("fullgraph", [False, True], ids=["breaks", "fullgraph"])


class First(nn.Linear):
    """With a forward of its own: torch does not compile its own layers by themselves."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


class Inplace(nn.Sequential):
    def forward(self, x):
        for module in self:
            x = module(x)
        return x


def model_with_inplace():
    torch.manual_seed(0)
    return Inplace(First(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


def compile_whole(model, **options):
    return torch.compile(model, **options)


def compile_in_place(model, **options):
    model.compile(**options)
    return model


def compile_child(model, **options):
    model[0].compile(**options)
    return model


def compile_function(model, **options):
    return torch.compile(lambda x: model(x) * 2, **options)


WAYS = {
    "whole": compile_whole,
    "in place": compile_in_place,
    "child": compile_child,
    "function": compile_function,
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


@pytest.fixture(autouse=True)
def fresh_compiler():
    gc.collect()  # contexts that other tests left to the collector
    torch._dynamo.reset()
    skips_guards = torch._dynamo.config.skip_nnmodule_hook_guards
    yield
    torch._dynamo.reset()
    assert torch._dynamo.config.skip_nnmodule_hook_guards == skips_guards
    assert torch._dynamo.eval_frame._stance.stance == "default"


def inputs(count):
    torch.manual_seed(1)
    return [torch.randn(3, 4) for _ in range(count)]


@backends
@fullgraphs
@ways
@pytest.mark.parametrize("first", [True, False], ids=["hooked first", "bare first"])
def test_alternating_with_and_without_a_capture_is_right_every_time(way, first, fullgraph, backend):
    model = model_with_inplace()
    run = way(model, backend=backend, fullgraph=fullgraph)
    for n, x in enumerate(inputs(8)):
        if (n % 2 == 0) == first:
            with hl.capture(model, "0", "1:input", "2", detach=True) as record:
                run(x)
            expected = nn.functional.linear(x, model[0].weight, model[0].bias)
            torch.testing.assert_close(record["0"], expected)
            torch.testing.assert_close(record["1:input"], expected)
            torch.testing.assert_close(record["2"], model[2](expected.relu()), check_stride=False)
        else:
            run(x)
        assert_clean(model)


@backends
@fullgraphs
@ways
def test_edits_and_gradients_of_a_compiled_model(way, fullgraph, backend):
    model = model_with_inplace()
    run = way(model, backend=backend, fullgraph=fullgraph)
    factor = 2 if way is compile_function else 1
    (x,) = inputs(1)
    bare = run(x)
    with hl.edit(model, "0", hl.zero()):
        edited = run(x)
    torch.testing.assert_close(edited, model[2].bias.expand(3, 2) * factor)
    torch.testing.assert_close(run(x), bare)
    with hl.edit(model, "2.weight", hl.zero()):
        torch.testing.assert_close(run(x), model[2].bias.expand(3, 2) * factor)
    torch.testing.assert_close(run(x), bare)
    with hl.replace_module(model, "2", nn.Identity()):
        assert run(x).shape == (3, 4)
    torch.testing.assert_close(run(x), bare)
    with hl.capture(model, "2:grad_output", "2.weight:grad") as record:
        run(x).sum().backward()
    torch.testing.assert_close(record["2:grad_output"], torch.full((3, 2), float(factor)))
    assert_clean(model)


class GraphCounter:
    """A backend that counts the graphs it is given."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward


@ways
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("attached", [True, False], ids=["attached", "with"])
def test_the_last_call_stays_in_the_graph_if_captured_before_the_first_compiled_call(way, attached):
    model, count = model_with_inplace(), GraphCounter()
    run = way(model, backend=count, fullgraph=True)
    context = hl.capture(model, "0", keep="last")
    record = context.attach().record if attached else context.__enter__()
    for x in inputs(12):
        run(x)
        expected = nn.functional.linear(x, model[0].weight, model[0].bias)
        torch.testing.assert_close(record["0"], expected)  # though the ReLU is in place
        assert record["0"].requires_grad
    assert 1 <= len(count.graphs) <= 2
    context.remove() if attached else context.__exit__(None, None, None)
    last = record["0"]
    for x in inputs(4):
        torch.testing.assert_close(run(x), (2 if way is compile_function else 1) * model(x))
    assert record["0"] is last
    with hl.capture(model, "0", keep="last", detach=True) as again:
        for x in inputs(3):
            run(x)
    torch.testing.assert_close(again["0"], nn.functional.linear(x, model[0].weight, model[0].bias))
    assert_clean(model)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTMCell(4, 4),
        lambda: Giving(lambda x: (x * 2, [x + 1, None])),
        lambda: Giving(lambda x: {"a": x * 2, "b": (x.sin(),)}),
    ],
    ids=["LSTMCell", "tuple", "dict"],
)
def test_the_last_nested_value_is_kept_beside_what_stays_in_the_graph(make, detach):
    model = nn.Sequential(nn.Linear(4, 4), make(), Giving(lambda given: leaves(given)[0][1] * 1))
    run = torch.compile(model, backend="eager")
    with hl.capture(model, "**", keep="last", detach=detach) as record:
        for x in inputs(3):
            out = run(x)
    with hl.capture(model, "**", detach=True) as expected:
        torch.testing.assert_close(out, model(x))
    for place in expected.places():
        found = [tensor for _, tensor in leaves(record[place])]
        torch.testing.assert_close(found, [tensor for _, tensor in leaves(expected[place])])
    assert record["0"].requires_grad is not detach
    assert_clean(model)


def test_what_is_kept_in_the_graph_has_a_gradient_and_leaves_results_as_they_are():
    model, other = model_with_inplace(), model_with_inplace()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    (x,) = inputs(1)
    handle = hl.capture(model, "0", keep="last").attach()
    out = run(x)
    (out.sum() + handle.record["0"].square().sum()).backward()
    hidden = nn.functional.linear(x, other[0].weight, other[0].bias)
    (other(x).sum() + hidden.square().sum()).backward()
    torch.testing.assert_close(model[0].weight.grad, other[0].weight.grad)
    torch.testing.assert_close(out, other(x))
    handle.remove()


@pytest.mark.parametrize("keep", ["last", "all"])
def test_a_capture_that_is_attached_after_the_first_compiled_call_runs_eagerly(keep):
    model = model_with_inplace()
    run = torch.compile(model, backend="eager")
    x, y = inputs(2)
    run(x)
    handle = hl.capture(model, "0", keep=keep, detach=True).attach()
    for batch in (x, y):
        run(batch)
        expected = nn.functional.linear(batch, model[0].weight, model[0].bias)
        torch.testing.assert_close(handle.record.calls("0")[-1], expected)
    handle.remove()


def test_another_model_of_the_same_class_does_not_lend_its_graph():
    """Its graph has no hooks, and torch would take it for the hooked model as well."""
    model, other = model_with_inplace(), model_with_inplace()
    run, run_other = (torch.compile(m, backend="eager", fullgraph=True) for m in (model, other))
    called = torch.compile(lambda m, x: m(x), backend="eager", fullgraph=True)
    handle = hl.capture(model, "0", keep="last").attach()
    for x in inputs(4):
        for go in (run, lambda x: called(model, x)):
            run_other(x + 1), called(other, x + 1)
            go(x)
            expected = nn.functional.linear(x, model[0].weight, model[0].bias)
            torch.testing.assert_close(handle.record["0"], expected)
    handle.remove()
    assert torch._dynamo.config.skip_nnmodule_hook_guards


COMPILED_INSIDE = """
import sys, warnings, torch
from torch import nn
import hookline as hl

model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
assert "torch._dynamo" not in sys.modules
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with hl.capture(model, "0") as record:
        run = torch.compile(model, backend="eager")
        run(x), run(x)
assert len(record.calls("0")) == 2
(told,) = [w for w in caught if "first used" in str(w.message)]
assert (told.filename, told.lineno) == ("<string>", 10), told
with hl.capture(model, "0") as record:
    run(x)
assert len(record.calls("0")) == 1
"""


def test_the_first_use_of_the_compiler_inside_a_with_is_told():
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", COMPILED_INSIDE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


COMPILED_LATER = """
import sys, warnings, torch
from torch import nn
import hookline as hl

warnings.simplefilter("ignore")
model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.ones(2, 4)
plain = model(x)
doubled = model[2](2 * model[:2](x))
handles = [hl.edit(model, "0", hl.scale(2.0)).attach(), hl.capture(model, "**", "0:input").attach()]
assert "torch._dynamo" not in sys.modules
run = torch.compile(model, backend="eager")
for n in (1, 2):
    torch.testing.assert_close(run(x), doubled)
    assert [len(handles[1].record.calls(place)) for place in handles[1].record] == [n] * 4
hl.attached(model).remove()
torch.testing.assert_close(model(x), plain)
"""


def test_what_was_attached_before_the_compiler_was_loaded_acts_in_a_model_compiled_later():
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", COMPILED_LATER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_eager_call_after_a_compiled_one_is_the_last_and_the_other_way_round():
    model = model_with_inplace()
    run = torch.compile(model, backend="eager", fullgraph=True)
    x, y = inputs(2)
    handle = hl.capture(model, "2", keep="last").attach()
    for _ in range(2):
        run(x)
        torch.testing.assert_close(handle.record["2"], model_with_inplace()(x))
        model(y)
        torch.testing.assert_close(handle.record["2"], model_with_inplace()(y))
    handle.remove()


def test_contexts_that_end_in_another_order_leave_the_stance_as_it_was():
    model = model_with_inplace()
    stance = torch._dynamo.eval_frame._stance
    one = hl.edit(model, "0", hl.scale(2.0)).attach()
    two = hl.edit(model, "2", hl.scale(2.0)).attach()
    assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    one.remove()
    assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    two.remove()
    assert torch._dynamo.eval_frame._stance == stance


def test_the_users_own_stance_is_put_back():
    model = model_with_inplace()
    with torch.compiler.set_stance("eager_on_recompile"):
        with hl.capture(model, "0"):
            model(torch.zeros(1, 4))
        assert torch._dynamo.eval_frame._stance.stance == "eager_on_recompile"


def test_a_failed_entering_leaves_the_stance_as_it_was():
    model = model_with_inplace()
    with pytest.raises(hl.errors.PlaceNotFound):
        hl.capture(model, "nowhere").attach()
    with pytest.raises(RuntimeError, match="mine"), hl.capture(model, "0"):
        raise RuntimeError("mine")


@fullgraphs
def test_a_model_that_is_compiled_inside_the_with(fullgraph):
    """It works, since the context is older than the graph: eagerly, as all that is compiled."""
    model = model_with_inplace()
    with hl.capture(model, "0", detach=True) as record:
        run = torch.compile(model, backend="eager", fullgraph=fullgraph)
        outs = [run(x) for x in inputs(2)]
    assert len(record.calls("0")) == len(outs) == 2


def test_other_threads_run_eagerly_too_and_right():
    model, other = model_with_inplace(), model_with_inplace()
    run = torch.compile(other, backend="eager")
    found = []
    with hl.capture(model, "2") as record:
        thread = threading.Thread(target=lambda: found.append(run(inputs(1)[0])))
        thread.start()
        thread.join()
        model(inputs(1)[0])
    torch.testing.assert_close(found[0], model(inputs(1)[0]))
    assert len(record.calls("2")) == 1


def test_a_compiler_that_is_being_imported_has_compiled_nothing(monkeypatch):
    half = types.ModuleType("torch._dynamo.convert_frame")
    half.__spec__ = ModuleSpec(half.__name__, None)
    half.__spec__._initializing = True
    monkeypatch.setitem(sys.modules, half.__name__, half)
    assert not compiler_is_used()
    half.__spec__._initializing = False  # then there is no telling
    assert compiler_is_used()


def test_operations_of_a_compiled_child_are_found_under_its_own_name():
    model, x = model_with_inplace(), torch.randn(3, 4)
    wanted = model[0](x)
    model[0] = torch.compile(model[0], backend="eager")
    model(x)
    assert hl.select(model, "0/*", inputs=x) == ["0._orig_mod/linear"]
    assert "0._orig_mod/linear" in hl.select(model, "**/*", inputs=x)
    for place in ("0/linear", "{0..1}/linear"):
        with hl.capture(model, place, detach=True) as record:
            model(x)
        assert torch.equal(record["0/linear"], wanted)
    with hl.edit(model, "0/linear", hl.zero()):
        assert torch.equal(model(x), model[2].bias.expand(3, 2))
    assert_clean(model)
