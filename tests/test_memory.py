"""Nothing is kept alive: over many rounds, after exceptions, and with the garbage collector off."""

import contextlib
import gc
import weakref
from pathlib import Path

import pytest
import torch
from models import Mark, OneOfTwo, Token, small
from oracles import assert_clean, objects_alive
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline as hl

MB = 2**20


@pytest.fixture(autouse=True, scope="module")
def _without_collector():
    """What leaks only until the next collection leaks all the same."""
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _afresh():
    """Collections look at what the test itself has made, which makes them quick."""
    gc.collect()
    gc.freeze()


def resident():
    """The bytes that the process holds in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def growth(run, rounds=40, warm=5):
    """By how much the memory grows over many rounds."""
    for _ in range(warm):
        run()
    before = resident()
    for _ in range(rounds):
        run()
    return resident() - before


def megabyte_model():
    """A model whose first activations take 1 MB each for an input of 256 rows."""
    return nn.Sequential(
        nn.Linear(8, 1024), nn.ReLU(inplace=True), nn.Linear(1024, 8), nn.Identity()
    )


def tensors_alive():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


# -- many rounds ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["backward", "none", "exception"])
@pytest.mark.parametrize("detach", [True, False], ids=["detached", "attached"])
@pytest.mark.parametrize(
    "places",
    [
        ["*"],
        ["*", "*:input", ":inputs", "0.weight"],
        ["*:grad_output", "{0,2,3}:grad_input", "**.weight:grad"],
    ],
    ids=["outputs", "inputs", "gradients"],
)
def test_memory_stays_flat_over_many_captures(places, detach, ends):
    model = megabyte_model()
    x = torch.randn(256, 8)

    def run():
        with contextlib.suppress(ZeroDivisionError):
            with hl.capture(model, *places, detach=detach) as record:
                loss = model(x.clone().requires_grad_()).sum()
                if ends == "backward":
                    loss.backward()
                if ends == "exception":
                    raise ZeroDivisionError
            assert record.places() or ends == "none"

    assert growth(run) < 16 * MB
    assert_clean(model)


def test_memory_stays_flat_over_many_captures_of_gradients_that_have_a_graph():
    model = megabyte_model()
    model[1] = nn.Tanh()
    x = torch.randn(256, 8, requires_grad=True)

    def run():
        with hl.capture(model, "*", "*:grad_output", "{0,2}:grad_input") as record:
            loss = model(x).square().sum()
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            torch.autograd.grad(grad.square().sum(), x)
        assert record.calls("2:grad_output")

    assert growth(run, rounds=40) < 16 * MB
    assert_clean(model)


@pytest.mark.parametrize(
    "make",
    [
        lambda m: hl.edit(m, ["*", "2:input"], hl.scale(1.0)),
        lambda m: hl.edit(m, ["2:grad_output", "2:grad_input"], hl.scale(1.0)),
        lambda m: hl.edit(m, "2.weight", hl.scale(1.0)),
        lambda m: hl.hook(m, ["*", "2:input", "2:grad_output"], lambda value: None),
        lambda m: hl.preserve(m),
        lambda m: hl.replace_module(m, "2", nn.Linear(1024, 8)),
    ],
    ids=["edit", "edit of gradients", "edit of parameters", "hook", "preserve", "replace_module"],
)
@pytest.mark.parametrize("fails", [False, True], ids=["well", "exception"])
def test_memory_stays_flat_over_many_other_contexts(make, fails):
    model = megabyte_model()
    x = torch.randn(256, 8)

    def run():
        with contextlib.suppress(ZeroDivisionError), make(model):
            model(x.clone().requires_grad_()).sum().backward()
            if fails:
                raise ZeroDivisionError

    assert growth(run, rounds=40) < 16 * MB
    assert_clean(model)


class Fragile(nn.Module):
    """Fails half-way, after its first layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 1024)
        self.second = nn.Linear(1024, 8)
        self.fails = True

    def forward(self, x):
        x = self.first(x)
        if self.fails:
            raise ZeroDivisionError
        return self.second(x)


@pytest.mark.parametrize("stop", [False, True], ids=["exception", "stop"])
def test_memory_stays_flat_when_forwards_do_not_complete(stop):
    model = Fragile()
    x = torch.randn(256, 8)

    def run():
        with contextlib.suppress(ZeroDivisionError):
            with hl.capture(model, "first", ":input", "first:input", stop=stop):
                model(x.clone().requires_grad_())

    assert growth(run) < 16 * MB


# -- attachments over a long training -------------------------------------------------------------


EVERYWHERE = ["*", "*:input", "*:grad_output", "*:grad_input", "**.weight:grad"]
ATTACHED = {
    "edit": lambda m: hl.edit(m, EVERYWHERE, hl.scale(1.0)),
    "hook": lambda m: hl.hook(m, [*EVERYWHERE, "0.weight"], lambda value: None),
    "first": lambda m: hl.capture(m, *EVERYWHERE, "0.weight", keep="first"),
    "last": lambda m: hl.capture(m, *EVERYWHERE, "0.weight", keep="last"),
    "parameter": lambda m: hl.capture(m, "0.weight", keep="last"),
}


@pytest.mark.parametrize("mode", ["train", "eval", "exception", "checkpoint"])
@pytest.mark.parametrize("make", ATTACHED.values(), ids=ATTACHED.keys())
def test_an_attachment_does_not_grow_with_the_number_of_calls(make, mode):
    model = small()
    x = torch.ones(4, 3, requires_grad=True)
    handle = make(model).attach()

    def run():
        if mode == "train":
            model(x).sum().backward()
        elif mode == "eval":
            with torch.no_grad():
                model(x)
        elif mode == "checkpoint":
            checkpoint(model, x, use_reentrant=False).sum().backward()
        else:
            with contextlib.suppress(RuntimeError):
                model(torch.ones(4, 7, requires_grad=True))

    def least():  # handles of dead graphs are dropped now and then, so what is left in between
        sizes = []
        for _ in range(8):
            for _ in range(10):
                run()
            sizes.append(objects_alive())
        return min(sizes)

    run()
    before, _, after = least(), least(), least()
    assert after < before + 60
    handle.remove()
    assert_clean(model)


# -- what is collectable --------------------------------------------------------------------------


def forward(model):
    """The output of a model, with a weak reference that lives as long as the graph."""
    token = Token()
    x = Mark.apply(torch.ones(4, 3, requires_grad=True), token)
    return model(x), weakref.ref(token)


def capture_and_forget(detach, places=("*",), backward=True):
    """A record, with weak references to the model, its output, and the graph of the output."""
    model = small()
    with hl.capture(model, *places, detach=detach) as record:
        out, graph = forward(model)
        if backward:
            out.sum().backward(retain_graph=True)
    return record, weakref.ref(model), weakref.ref(out), graph


GRADIENTS = ("*:grad_output", "*:grad_input", "**.weight:grad")


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize(
    "places", [("*",), ("*:input",), ("*", "*:inputs", "0.weight"), (*GRADIENTS, "0")]
)
def test_everything_is_freed_at_once_when_nothing_is_kept(places, detach, backward):
    record, model, out, graph = capture_and_forget(detach, places, backward)
    del record
    assert (model(), out(), graph()) == (None, None, None)


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("places", [("*",), ("*:input",), ("*", "*:inputs"), (*GRADIENTS, "0")])
def test_a_detached_record_keeps_neither_the_model_nor_the_graph(places, backward):
    record, model, out, graph = capture_and_forget(True, places, backward)
    assert (model(), out(), graph()) == (None, None, None)
    place = record.places()[0]
    assert len(record.calls(place)) == 1
    assert str(place) in repr(record)


def test_an_attached_record_keeps_its_values_but_not_the_model():
    record, model, out, graph = capture_and_forget(False)
    assert model() is None
    assert out() is record["2"]
    assert graph() is not None
    del record
    assert (out(), graph()) == (None, None)


def test_a_record_of_gradients_keeps_neither_the_model_nor_the_graph():
    record, model, out, graph = capture_and_forget(False, GRADIENTS)
    assert (model(), out(), graph()) == (None, None, None)
    assert record["2:grad_output"].shape == (4, 2)


def test_a_record_can_be_read_when_the_model_is_gone():
    record, model, *_ = capture_and_forget(True, ("*", "0:inputs", *GRADIENTS))
    assert model() is None
    for place in record.places():
        assert record.calls(place)
    assert record["0:inputs[input]"].shape == (4, 3)
    assert record.unfired() == {}
    with pytest.raises(hl.NotCaptured, match="nowhere"):
        _ = record["nowhere"]


def test_the_model_is_freed_while_the_context_of_a_tensor_hook_is_kept_by_the_tensor():
    leaf = torch.ones(3, requires_grad=True)
    gone = weakref.ref(leaf)
    with hl.capture(leaf, ":grad") as record:
        (leaf * 2).sum().backward()
    del leaf
    assert gone() is None
    assert record[":grad"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("verb", ["edit", "hook"])
def test_a_finished_edit_keeps_neither_values_nor_graphs(verb):
    model = small()
    places = ["*", "2:input", "2:grad_output", "2:grad_input"]
    function = (lambda value: value * 1) if verb == "edit" else (lambda value: None)
    context = getattr(hl, verb)(model, places, function)
    with context:
        out, graph = forward(model)
        out.sum().backward(retain_graph=True)
    output = weakref.ref(out)
    del out
    assert (output(), graph()) == (None, None)
    assert context is not None


def test_the_exception_of_a_place_that_never_fired_keeps_no_model():
    def fail():
        model = OneOfTwo()
        try:
            with hl.capture(model, "used", "unused", detach=True):
                model(torch.ones(1, 3))
        except hl.NeverFired as error:
            return error.with_traceback(None), weakref.ref(model)

    error, model = fail()
    gc.collect()
    assert model() is None
    assert error.record["used"].shape == (1, 3)


def test_the_values_of_a_failed_forward_are_freed_with_its_exception():
    model = Fragile()

    def run():
        x = torch.ones(2, 8, requires_grad=True)
        with contextlib.suppress(ZeroDivisionError):
            with hl.capture(
                model, ":input", "first:input", "first:grad_input", "first:grad_output"
            ):
                model(x)
        return weakref.ref(x)

    assert run()() is None


def test_a_failed_call_of_an_attached_hook_keeps_nothing_after_the_next_call():
    model = Fragile()
    handle = hl.edit(model, [":input", ":grad_input", "first:grad_input"], hl.scale(1.0)).attach()

    def run():
        x = torch.ones(2, 8, requires_grad=True)
        with contextlib.suppress(ZeroDivisionError):
            model(x)
        return weakref.ref(x)

    first = run()
    model.fails = False
    model(torch.ones(2, 8))
    assert first() is None
    handle.remove()
    assert_clean(model)


def test_a_slice_keeps_only_its_own_memory():
    model = nn.Identity()
    with torch.no_grad(), hl.capture(model, "", at=lambda value: value[:, 0]) as record:
        for _ in range(20):
            model(torch.zeros(256, 1024))
    kept = record.calls("")
    assert sum(value.untyped_storage().nbytes() for value in kept) <= 2 * record.nbytes
    assert record.nbytes == 20 * 256 * 4


def test_a_record_of_many_calls_holds_one_value_a_call_and_no_more():
    model = small()
    with torch.no_grad(), hl.capture(model, "0", "0:input") as record:
        before = tensors_alive()
        for _ in range(50):
            model(torch.ones(4, 3))
        assert tensors_alive() - before <= 100 + 5
    assert len(record.calls("0")) == 50


@pytest.mark.parametrize("port", ["", ":grad_output", ":grad_input"])
def test_a_record_that_was_read_is_freed_at_once(port):
    model = megabyte_model()

    def run():
        with hl.capture(model, f"**{port}") as record:
            x = torch.ones(256, 8, requires_grad=True) * 1
            model(x).sum().backward()
        assert record.calls(f"2{port}")
        assert repr(record)

    assert growth(run) < 16 * MB


@pytest.mark.parametrize("port", ["output", "grad_output", "grad_input"])
def test_what_was_read_of_a_record_goes_with_it(port):
    model = small()
    with hl.capture(model, f"**:{port}") as record:
        model(torch.ones(4, 3, requires_grad=True) * 1).sum().backward()
    values = [weakref.ref(value) for _, value in record.items()]
    assert len(values) > 1
    del record
    assert all(value() is None for value in values)


def test_captures_of_gradients_keep_no_graph_that_a_running_module_has_dropped():
    tokens = weakref.WeakSet()

    class Inner(nn.Module):
        def forward(self, x):
            token = Token()
            tokens.add(token)
            return Mark.apply(x, token)

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            for _ in range(10):
                y = self.inner(x)
            self.alive = len(tokens)
            return y

    model = Loop()
    with hl.capture(model, ":grad_input", "**:grad_input"):
        model(torch.ones(3, requires_grad=True) * 1).sum().backward()
    assert model.alive == 1


@pytest.mark.parametrize("keep", ["all", "last"])
def test_a_gradient_that_is_a_small_part_of_a_large_one_keeps_only_its_own_memory(keep):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.small, self.large = nn.Linear(4, 4), nn.Linear(4, 100_000)

        def forward(self, x):
            return torch.cat([self.small(x), self.large(x)], 1)

    model = Both()
    with hl.capture(model, "small:grad_output", keep=keep) as record:
        model(torch.randn(2, 4)).square().sum().backward()
    gradient = record["small:grad_output"]
    assert gradient.untyped_storage().nbytes() <= 8 * gradient.nbytes
