"""Exceptions anywhere: nothing is left behind, and the user's exception survives."""

import gc
import pickle
import sys
import threading
import warnings

import pytest
import torch
from models import Failing, Swallowing, small
from oracles import assert_clean, assert_same_state, bits, hooks_left, state_bits
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline as hl

X = torch.arange(12.0).reshape(4, 3) / 10

CONTEXTS = {
    "capture": lambda m: hl.capture(m, "**"),
    "capture of everything": lambda m: hl.capture(
        m, "**", "**:inputs", "**:grad_output", "**:grad_input", "**:value", "**:grad"
    ),
    "edit": lambda m: hl.edit(m, ["**", "**:input"], hl.scale(2.0)),
    "edit of gradients": lambda m: hl.edit(m, ["**:grad_output", "**:grad"], hl.scale(2.0)),
    "edit of parameters": lambda m: hl.edit(m, "**:value", hl.scale(2.0)),
    "hook": lambda m: hl.hook(m, ["**", "**:input", "**:grad_output"], lambda value: None),
    "preserve": lambda m: hl.preserve(m),
    "replace_module": lambda m: hl.replace_module(m, "second", nn.Identity()),
}
every_context = pytest.mark.parametrize("make", CONTEXTS.values(), ids=CONTEXTS.keys())
every_error = pytest.mark.parametrize(
    "error",
    [ValueError("mine"), KeyboardInterrupt("mine"), SystemExit("mine"), GeneratorExit("mine")],
)


def raise_after(run, error):
    run()
    raise error


def assert_as_before(model, before):
    assert_clean(model)
    assert hl.attached(model) == []
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert_same_state(model, before)


# -- exceptions in the model and in the block -----------------------------------------------------


@every_error
@every_context
def test_nothing_is_left_when_the_model_raises(make, error):
    model = Failing(error)
    modules, before = dict(model.named_modules()), state_bits(model)
    with pytest.raises(type(error), match="mine") as caught:
        with make(model):
            model(X.clone().requires_grad_())
    assert caught.value is error
    assert_as_before(model, before)
    assert dict(model.named_modules()) == modules


@every_error
@every_context
def test_nothing_is_left_when_the_block_raises_after_the_backward(make, error):
    model = Failing()
    before = state_bits(model)
    with pytest.raises(type(error), match="mine") as caught, make(model):
        raise_after(lambda: model(X.clone().requires_grad_()).sum().backward(), error)
    assert caught.value is error
    assert_as_before(model, before)


@every_context
def test_the_model_works_as_before_after_a_failure(make):
    model = Failing()
    expected = model(X)
    grads = torch.autograd.grad(model(X).sum(), list(model.parameters()))
    model.error = ValueError("mine")
    with pytest.raises(ValueError, match="mine"), make(model):
        model(X.clone().requires_grad_())
    model.error = None
    assert torch.equal(model(X), expected)
    again = torch.autograd.grad(model(X).sum(), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


def test_what_was_captured_before_the_exception_can_be_read():
    model = Failing(ValueError("mine"))
    with pytest.raises(ValueError, match="mine"):
        with hl.capture(model, "first", ":input", "second") as record:
            model(X)
    assert torch.equal(record["first"], model.first(X))
    assert torch.equal(record[":input"], X)
    with pytest.raises(hl.NeverFired, match="second"):
        _ = record["second"]
    assert_clean(model)


def test_an_exception_in_the_backward_leaves_nothing():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("mine")

    model = small()
    with pytest.raises(ValueError, match="mine"):
        with hl.capture(model, "**", "**:grad_output", "**:grad_input", "**:grad") as record:
            Bad.apply(model(X.clone().requires_grad_())).sum().backward()
    assert_clean(model)
    with pytest.raises(hl.GradientNotAvailable):
        _ = record["0:grad_output"]
    model(X).sum().backward()


# -- exceptions in the user's function ------------------------------------------------------------


def fail(value):
    raise ZeroDivisionError("mine")


def interrupted_by_user(value):
    raise KeyboardInterrupt("mine")


FUNCTIONS = {
    "hook": lambda m, place, fn: hl.hook(m, place, fn),
    "edit": lambda m, place, fn: hl.edit(m, place, fn),
    "transform": lambda m, place, fn: hl.capture(m, place, transform=fn),
    "at": lambda m, place, fn: hl.capture(m, place, at=fn),
}


@pytest.mark.parametrize(
    "place", ["0", "0:input", "2:inputs[input]", "2:grad_output", "0:grad_input", "0.weight:grad"]
)
@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_the_users_exception_keeps_its_type_and_gains_a_note_with_the_place(make, place):
    model = small()
    before = state_bits(model)
    with pytest.raises(ZeroDivisionError) as caught:
        with make(model, place, fail):
            model(X.clone().requires_grad_()).sum().backward()
    assert caught.value.args == ("mine",)
    notes = [note for note in caught.value.__notes__ if repr(place) in note]
    assert len(notes) == 1
    assert_as_before(model, before)
    model(X).sum().backward()


@pytest.mark.parametrize(
    "place", ["0", "0:input", "2:grad_output", "0:grad_input", "0.weight:grad"]
)
@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_an_interrupt_in_the_users_function_leaves_nothing(make, place):
    model = small()
    before = state_bits(model)
    with pytest.raises(KeyboardInterrupt, match="mine"):
        with make(model, place, interrupted_by_user):
            model(X.clone().requires_grad_()).sum().backward()
    assert_as_before(model, before)
    model(X).sum().backward()


def test_the_note_names_the_first_name_of_a_shared_module():
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, layer)
    with pytest.raises(ZeroDivisionError) as caught, hl.hook(model, "1", fail):
        model(X)
    assert any("'0'" in note for note in caught.value.__notes__)


def test_an_exception_in_an_attached_hook_gains_the_note_too_and_the_hook_stays():
    model = small()
    handle = hl.hook(model, "0", fail).attach()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError) as caught:
            model(X)
        assert sum("'0'" in note for note in caught.value.__notes__) == 1
    handle.remove()
    assert_clean(model)
    model(X)


def test_an_exception_with_arguments_of_its_own_survives():
    class Picky(Exception):
        def __init__(self, code, detail):
            super().__init__(code)
            self.code, self.detail = code, detail

    def fail(value):
        raise Picky(7, detail=[1, 2])

    model = small()
    with pytest.raises(Picky) as caught, hl.edit(model, "0", fail):
        model(X)
    assert (caught.value.code, caught.value.detail) == (7, [1, 2])


def test_a_function_that_fails_inside_a_checkpoint_leaves_nothing():
    model, count = small(), []

    def second_time(value):
        count.append(1)
        if len(count) == 2:
            raise ZeroDivisionError("mine")

    for reentrant in (True, False):
        count.clear()
        with pytest.raises(ZeroDivisionError, match="mine") as caught:
            with hl.hook(model, "0", second_time):
                checkpoint(
                    model, X.clone().requires_grad_(), use_reentrant=reentrant
                ).sum().backward()
        assert any("'0'" in note for note in caught.value.__notes__)
        assert_clean(model)


def test_a_model_that_swallows_the_users_exception_is_left_clean():
    model = Swallowing(Exception)
    with hl.hook(model, "first", fail):
        model(X)
    assert_clean(model)


# -- registration that fails part-way -------------------------------------------------------------


FAILING = {
    "a glob and a bad place": lambda m: hl.capture(m, "**", "nowhere"),
    "a glob and a bad port": lambda m: hl.capture(m, "**", "0:sideways"),
    "gradients and a bad place": lambda m: hl.capture(m, "**:grad", "**:grad_output", "nowhere"),
    "a predicate that raises": lambda m: hl.capture(m, "**", lambda name, module: 1 / 0),
    "stop at a gradient": lambda m: hl.capture(
        m, "**", "0:grad_output", "0.weight:grad", stop=True
    ),
    "a patch without its place": lambda m: hl.edit(
        m, {"0": hl.zero(), "0.weight:grad": hl.zero(), "2": hl.patch(record_of("0"))}
    ),
    "a parameter edit with a bad shape": lambda m: hl.edit(
        m, {"0": hl.zero(), "0.weight": hl.zero(), "2.weight": hl.replace(torch.zeros(9, 9))}
    ),
    "a parameter edit that raises on the second": lambda m: hl.edit(
        m, {"0.weight": hl.zero(), "2.weight": fail}
    ),
    "a parameter edit that is interrupted on the second": lambda m: hl.edit(
        m, {"0.weight": hl.zero(), "0:grad_output": hl.zero(), "2.weight": interrupted_by_user}
    ),
    "a parameter edit that gives None": lambda m: hl.edit(
        m, {"0.weight": hl.zero(), "0.bias": lambda v: None}
    ),
    "a second replacement that raises": lambda m: hl.replace_module(m, nn.Linear, Replacer()),
    "preserve of nothing": lambda m: hl.preserve(m, "0", "nowhere"),
}


class Replacer:
    def __init__(self):
        self.count = 0

    def __call__(self, module):
        self.count += 1
        return nn.Identity() if self.count == 1 else None


def record_of(place):
    model = small()
    with hl.capture(model, place) as record:
        model(X)
    return record


@pytest.mark.parametrize("way", ["with", "attach"])
@pytest.mark.parametrize("make", FAILING.values(), ids=FAILING.keys())
def test_a_registration_that_fails_part_way_is_rolled_back(make, way):
    model = small()
    expected, before, modules = model(X), state_bits(model), dict(model.named_modules())
    context = make(model)
    with pytest.raises((Exception, KeyboardInterrupt)):
        context.__enter__() if way == "with" else context.attach()
    assert_as_before(model, before)
    assert dict(model.named_modules()) == modules
    assert torch.equal(model(X), expected)
    context.remove()


def test_a_parameter_edit_is_rolled_back_where_torch_allows_no_saved_tensor_hooks():
    model = small()
    before = state_bits(model)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        context = hl.edit(model, "0.weight", hl.zero())
        try:
            context.__enter__()
        except RuntimeError:
            pass
        else:
            context.__exit__(None, None, None)
    assert_as_before(model, before)


def test_a_context_that_failed_to_enter_can_be_entered_later():
    model = small()
    context = hl.capture(model, "0", "3")
    with pytest.raises(hl.PlaceNotFound, match="3"):
        context.__enter__()
    model.append(nn.ReLU())
    with context as record:
        model(X)
    assert record.places() == ["0", "3"]
    assert_clean(model)


# -- an interrupt at every line -------------------------------------------------------------------


OURS = hl.__file__.removesuffix("__init__.py")


class InterruptAt:
    """Raises KeyboardInterrupt before the n-th line that runs in hookline's own files."""

    def __init__(self, n):
        self.left = n

    def __call__(self, frame, event, arg):
        # Not every path with our name in it: a clone, with torch in its .venv, may bear it too.
        ours = frame.f_code.co_filename.startswith(OURS)
        if not ours or frame.f_code.co_name == "__del__":
            return None
        return self.line

    def line(self, frame, event, arg):
        if event == "line" and frame.f_code.co_name != "__del__":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt("mine")
        return self.line


@pytest.mark.parametrize(
    "make",
    [
        lambda m: hl.capture(m, "0", "2:input"),
        lambda m: hl.capture(m, "0:grad_output", "0.weight:grad"),
        lambda m: hl.capture(m, "**", "**:grad_output", "**:grad_input"),
        lambda m: hl.edit(m, {"0": hl.scale(2.0), "0.weight": hl.zero()}),
        lambda m: hl.replace_module(m, "1", nn.Identity()),
        lambda m: hl.preserve(m, "0"),
    ],
    ids=["capture", "of gradients", "of everything", "edit", "replace_module", "preserve"],
)
def test_an_interrupt_at_any_line_leaves_nothing_once_the_context_is_collected(make):
    model = small()
    before, relu = state_bits(model), model[1]
    trace, n, where, left = sys.gettrace(), 0, "", []
    while where is not None and not left:
        n += 1
        where = interrupted_at(n, make(model), lambda: model(X), trace)
        left = hooks_left(model)
        left += [k for k, v in model.state_dict().items() if not torch.equal(bits(v), before[k])]
        left += ["replaced"] if model[1] is not relu else []
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            left += ["saved tensor hooks"]
    assert (left, where) == ([], None)
    assert n > 20


def interrupted_at(n, context, run, trace):
    """Enter, run and leave, interrupted at the n-th line; None if there are fewer lines."""
    interrupt = InterruptAt(n)
    try:
        sys.settrace(interrupt)
        with context:
            run()
    except KeyboardInterrupt:
        return interrupt.where
    finally:
        sys.settrace(trace)
        with warnings.catch_warnings():  # before its first line it was not entered
            warnings.simplefilter("ignore", hl.HooklineWarning)
            del context
    return None


def test_an_interrupt_at_any_line_of_a_replacement_lets_other_threads_replace_the_module():
    trace, n, where, waiting = sys.gettrace(), 0, "", []
    while where is not None and not waiting:
        n += 1
        model = small()
        where = interrupted_at(n, hl.replace_module(model, "1", nn.Identity()), bool, trace)
        other = threading.Thread(target=replace_and_leave, args=(model,), daemon=True)
        other.start()
        other.join(timeout=20)
        waiting = [where] if other.is_alive() else []
    assert not waiting
    assert n > 20


def replace_and_leave(model):
    with hl.replace_module(model, "1", nn.Identity()):
        pass


@pytest.mark.parametrize("while_open", [True, False], ids=["open", "closed"])
@pytest.mark.parametrize("port", ["output", "grad_input"])
def test_an_interrupt_at_any_line_of_reading_changes_nothing_that_is_read_later(port, while_open):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def read():
        return [(place, len(record.calls(place))) for place in record.places()]

    trace, n, interrupted = sys.gettrace(), 0, True
    while interrupted:
        n, context = n + 1, hl.capture(model, f"**:{port}")
        record = context.__enter__()
        for _ in range(2):
            model(X.clone().requires_grad_() * 1).sum().backward()
        if not while_open:
            context.remove()
        try:
            sys.settrace(InterruptAt(n))
            read()
            interrupted = False
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(trace)
        context.remove()
        assert [count for _, count in read()] == [2, 2], n
    assert n > 20


# -- messages -------------------------------------------------------------------------------------


def test_an_error_of_a_capture_can_cross_to_another_process():
    model = Failing()
    model.error = ValueError()
    with pytest.raises(hl.NeverFired) as caught:
        with hl.capture(model, "second"):
            pass
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert isinstance(again, hl.NeverFired)


def test_no_mode_or_flag_is_left_after_gradient_captures():
    model = small()
    enabled = torch.is_grad_enabled()
    with torch.no_grad(), hl.capture(model, "**", "**:grad_output"):
        model(X)
    assert torch.is_grad_enabled() == enabled
    assert model.training
    assert torch.overrides._get_current_function_mode_stack() == []
    gc.collect()
    assert_clean(model)


# -- torch's fast path ----------------------------------------------------------------------------


def encoder_layer():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()


@pytest.mark.parametrize(
    "places", [["linear1", "self_attn", "norm2"], ["**"], [""], ["linear2:input"]]
)
def test_the_fast_path_of_an_encoder_layer_does_not_hide_its_children(places, monkeypatch):
    fast = []
    inner = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(
        torch, "_transformer_encoder_layer_fwd", lambda *a: fast.append(1) or inner(*a)
    )
    model, x = encoder_layer(), torch.randn(2, 5, 8)
    with torch.no_grad():
        bare = model(x)
        assert fast  # torch skips the children here
        with hl.capture(model, *places) as record:
            hooked = model(x)
        assert len(fast) == 1
        torch.testing.assert_close(hooked, bare)
        assert record.places()
        assert torch.equal(model(x), bare)
    assert len(fast) == 2
    assert_clean(model)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("place", ["layers.0.linear1", "layers.1.norm2", "layers.1", "**"])
def test_an_encoder_with_a_padding_mask_gives_the_same_result_while_captured(place):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 5, 8)
    mask = torch.tensor([[False] * 3 + [True] * 2, [False] * 5])
    with torch.no_grad():
        bare = model(x, src_key_padding_mask=mask)
        with hl.capture(model, place):
            hooked = model(x, src_key_padding_mask=mask)
    torch.testing.assert_close(hooked[~mask], bare[~mask])
    assert_clean(model)


@pytest.mark.parametrize("verb", [hl.capture, lambda m, w: hl.edit(m, w, hl.zero())])
def test_the_projection_of_an_attention_module_gives_an_error_that_names_the_cause(verb):
    model = encoder_layer()
    with pytest.raises(hl.NeverFired, match=r"MultiheadAttention uses the weights of its out_proj"):
        with torch.no_grad(), verb(model, "self_attn.out_proj"):
            model(torch.randn(2, 5, 8))
    assert_clean(model)


def test_the_projection_is_among_the_unfired_of_a_glob():
    model = encoder_layer()
    with torch.no_grad(), hl.capture(model, "**") as record:
        model(torch.randn(2, 5, 8))
    assert "MultiheadAttention" in record.unfired()["self_attn.out_proj"]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_tracing_inside_a_capture_gives_the_trace_of_the_bare_model():
    model = small().eval()
    with torch.no_grad():
        bare = torch.jit.trace(model, X)
        with hl.capture(model, "0", "2:input"):
            traced = torch.jit.trace(model, X)
    kinds = [node.kind() for node in traced.inlined_graph.nodes()]
    assert kinds == [node.kind() for node in bare.inlined_graph.nodes()]
    assert_clean(model)
