"""The mechanism of captures, edits and hooks: what no other test file may know.

This file changes with the engine. All other tests compare values, errors, memory and what is left
behind, and hold for any engine.

- on modules: the entries in hook dicts while a context is open
- on tensors: hooks that are registered without `Tensor.register_hook`
- compiled models: bytecode of hooks that dynamo can rewrite, and process-wide settings
"""

import dis
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from models import small
from torch import nn

import hookline as hl
from hookline.engine.compiling import Setting, Slot
from hookline.engine.tensor_hooks import TensorHooks
from hookline.engine.tracer import Tracer

X = torch.arange(12.0).reshape(4, 3) / 10


# -- on modules -----------------------------------------------------------------------------------


def membership(module):
    """Return the number of entries in each hook dict of a module."""
    names = (
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_backward_hooks",
        "_backward_pre_hooks",
    )
    return {name: len(getattr(module, name)) for name in names}


@pytest.mark.parametrize(
    ("place", "register"),
    [
        ("0", lambda m: [m.register_forward_hook(lambda m, a, k, o: None, with_kwargs=True)]),
        (
            "0:input",
            lambda m: [
                m.register_forward_pre_hook(lambda m, a, k: None, with_kwargs=True),
                m.register_forward_hook(lambda m, a, o: None),
            ],
        ),
    ],
)
def test_entries_in_the_hook_dicts_are_those_that_public_registration_makes(place, register):
    by_hand, ours = small(), small()
    handles = register(by_hand[0])
    with hl.hook(ours, place, lambda value: None):
        assert membership(ours[0]) == membership(by_hand[0])
        ours(X)
    for handle in handles:
        handle.remove()
    assert membership(ours[0]) == membership(by_hand[0])


def test_the_hook_of_a_plain_capture_equals_a_public_one_without_kwargs():
    by_hand, ours = small(), small()
    by_hand[0].register_forward_hook(lambda m, a, o: None)
    with hl.capture(ours, "0"):
        assert membership(ours[0]) == membership(by_hand[0])
        ours(X)


def test_one_hook_of_each_kind_serves_all_places_of_a_context_on_a_module():
    model = small()
    places = [
        "0",
        "0:input",
        "0:inputs",
        "0:grad_output",
        "0:grad_input",
        "0.weight",
        "0.bias:grad",
    ]
    with hl.capture(model, *places):
        counts = membership(model[0])
        model(X.clone().requires_grad_()).sum().backward()
    assert counts["_forward_hooks"] == counts["_forward_pre_hooks"] == 1
    assert counts["_backward_hooks"] == counts["_backward_pre_hooks"] == 0


@pytest.mark.parametrize("order", [["0", "**", "2:input"], ["**", "2:input", "0"]], ids=str)
def test_a_module_that_is_asked_for_twice_has_one_hook(order):
    model = small()
    with hl.capture(model, *order):
        assert [membership(module)["_forward_hooks"] for module in model] == [1, 1, 1]
        model(X)


def test_gradients_of_layers_of_torch_need_no_hook_before_a_call():
    class Own(nn.Linear):
        """A class of the user. Its output need not be a new tensor."""

    model = nn.Sequential(nn.Linear(3, 3), nn.SiLU(), Own(3, 3))
    with hl.capture(model, "*:grad_output"):
        assert [membership(module)["_forward_pre_hooks"] for module in model] == [0, 0, 1]
        model(X).sum().backward()


# -- on tensors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 1])
def test_a_hook_that_is_put_on_a_tensor_directly_is_like_a_registered_one(before):
    results = []
    for ours in (True, False):
        leaf = torch.ones(2, requires_grad=True)
        y, seen = leaf * 3, []
        for _ in range(before):
            y.register_hook(lambda g: g * 2)
        handles = TensorHooks()
        for function in (lambda g, seen=seen: seen.append(g.tolist()), lambda g: g * 10):
            (handles.put if ours else handles.add)(y, function)
        y.sum().backward(retain_graph=True)
        again = TensorHooks(handles)
        handles.remove_all()
        again.remove_all()
        y.sum().backward()
        results.append((leaf.grad.tolist(), seen, len(y._backward_hooks)))
    assert results[0] == results[1]


# -- compiled models ------------------------------------------------------------------------------


def test_hooks_have_no_jump_that_torch_cannot_rewrite():
    # A jump that needs EXTENDED_ARG can make dynamo of torch 2.13 raise "exception table entry
    # start instruction has no offset".
    for hook in (Tracer.after, Tracer.after_with_kwargs, Slot.after):
        assert "EXTENDED_ARG" not in [step.opname for step in dis.get_instructions(hook)]


def test_a_global_setting_lasts_until_its_last_user_ends():
    entered, left = [], []

    class Making:
        def __enter__(self):
            entered.append(self)

        def __exit__(self, *error):
            left.append(self)

    setting, users = Setting(Making), [object(), object()]
    for user in users:
        setting.begin(user)
    for _ in range(2):  # to end again does nothing
        setting.end(users[0])
    assert (len(entered), len(left)) == (1, 0)
    setting.end(users[1])
    assert (len(entered), len(left)) == (1, 1)
    setting.begin(users[0])
    assert len(entered) == 2
    setting.end(users[0])


def test_threads_that_give_up_a_lock_that_an_interrupt_left_go_on_to_the_same_one():
    waiting = threading.Barrier(4)

    class Left:  # never released
        def acquire(self, timeout):
            waiting.wait(timeout=60)
            return False

    setting = Setting(nullcontext)
    setting.lock = Left()

    def take():
        lock = setting.acquire()
        lock.release()
        return lock

    with ThreadPoolExecutor(4) as pool:
        taken = [pool.submit(take) for _ in range(4)]
        assert len({done.result() for done in taken}) == 1


# -- what stays small and empty -------------------------------------------------------------------


def test_hooks_of_graphs_that_are_gone_are_forgotten():
    model = small()
    with hl.capture(model, "*:grad_output") as record:
        tracer = record._tracer
        for _ in range(300):
            model(X)
        assert len(tracer.tensor_hooks) < 300


def test_no_call_is_left_running_where_operations_and_outputs_are_asked_for():
    class Doubling(nn.Module):
        def forward(self, x):
            return x.mul(2)

    model = Doubling()
    with hl.capture(model, "/mul", "") as record:
        model(X)
        model(X)
        assert not record._tracer.running
    assert [len(record.calls(place)) for place in ("/mul", "")] == [2, 2]
