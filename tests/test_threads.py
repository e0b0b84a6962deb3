"""Threads, tasks and executors: captures see their own calls, edits and attachments all."""

import asyncio
import contextlib
import contextvars
import functools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import Recursive, small
from oracles import assert_clean
from torch import nn

import hookline as hl

X = torch.arange(12.0).reshape(4, 3) / 10


@pytest.fixture
def hasty():
    """Lets threads take turns as often as Python can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_thread(function, *args):
    """What a function returns, or raises, in a thread of its own."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function, *args).result()


def run_all(*functions):
    """Run functions in threads at the same time; raise what any of them raises."""
    gate = threading.Barrier(len(functions))

    def run(function):
        gate.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as executor:
        return [f.result() for f in [executor.submit(run, function) for function in functions]]


# -- threads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [["0"], ["0:input", "0"], ["0:input"], ["0[0]", "0"]])
def test_calls_of_another_thread_do_not_land_in_a_capture(places):
    model = nn.Sequential(nn.Identity())
    with hl.capture(model, *places) as record:
        model((X,)), in_thread(model, (X + 1,)), model((X + 2,))
    for place in places:
        assert len(record.calls(place)) == 2
    assert_clean(model)


def test_two_threads_capture_at_the_same_time_and_each_sees_its_own(hasty):
    model = small()

    def work(shift):
        values = [X + shift + n for n in range(30)]
        with hl.capture(model, "0:input", "2") as record, torch.no_grad():
            outs = [model(value) for value in values]
        inputs = record.calls("0:input")
        assert all(torch.equal(a, b) for a, b in zip(inputs, values, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(record.calls("2"), outs, strict=True))

    run_all(*(lambda n=n: work(n * 100) for n in range(4)))
    assert_clean(model)


def test_two_threads_capture_gradients_and_each_sees_its_own(hasty):
    model = small()

    def work(factor):
        for _ in range(20):
            with hl.capture(model, "2:grad_output", "0:grad_input") as record:
                x = X.clone().requires_grad_()
                out = model(x) * factor
                torch.autograd.grad(out.sum(), x)
            assert torch.equal(record["2:grad_output"], torch.full((4, 2), factor))
            assert len(record.calls("0:grad_input")) == 1

    run_all(*(lambda n=n: work(n + 1.0) for n in range(3)))
    assert_clean(model)


def test_threads_all_sees_every_call_and_pairs_inputs_with_outputs(hasty):
    model = nn.Linear(3, 3)

    def work(shift):
        for n in range(50):
            model(torch.full((1, 3), shift + n))

    def slow(value):
        time.sleep(0)  # let another thread in
        return value

    with hl.capture(model, ":input", "", threads="all", transform=slow, detach=True) as record:
        run_all(*(lambda n=n: work(n * 1000.0) for n in range(4)))
    inputs, outputs = record.calls(":input"), record.calls("")
    assert len(inputs) == len(outputs) == 200
    assert len({x[0, 0].item() for x in inputs}) == 200
    with torch.no_grad():
        assert all(torch.equal(model(x), y) for x, y in zip(inputs, outputs, strict=True))
    assert_clean(model)


def test_threads_all_pairs_recursive_calls_of_several_threads(hasty):
    model = Recursive()
    with hl.capture(model, ":input", "", threads="all", detach=True) as record:
        run_all(*(lambda n=n: [model(X + n, depth=2) for _ in range(15)] for n in range(3)))
    assert len(record.calls(":input")) == len(record.calls("")) == 3 * 15 * 3
    assert_clean(model)


def test_edits_and_attachments_apply_to_every_thread():
    model = small()
    watch = hl.capture(model, "2").attach()
    with hl.edit(model, "2", hl.zero()):
        assert not in_thread(model, X).any()
    watch.remove()
    assert len(watch.record.calls("2")) == 1
    assert_clean(model)


@pytest.mark.parametrize("place", ["0", "0:input", "0:grad_output", "0.weight"])
def test_a_place_that_fired_in_another_thread_only_is_told_with_the_remedy(place):
    model = small()
    with pytest.raises(hl.NeverFired, match=r"another thread or task.*threads='all'"):
        with hl.capture(model, place):
            in_thread(model, X)
    assert_clean(model)


def test_stop_in_one_thread_does_not_stop_another():
    model = small()
    entered, done = threading.Event(), threading.Event()

    def bystander():
        entered.wait(10)
        out = [model(X) for _ in range(5)]
        done.set()
        return out

    with ThreadPoolExecutor(1) as executor:
        other = executor.submit(bystander)
        with hl.capture(model, "0", stop=True) as record:
            entered.set()
            done.wait(10)
            model(X)
            raise AssertionError("not reached")
        assert len(other.result()) == 5
    assert len(record.calls("0")) == 1
    assert_clean(model)


def test_calls_of_an_edit_are_numbered_without_gaps_over_threads(hasty):
    model, seen = nn.Identity(), []
    with hl.hook(model, "", lambda value, call: seen.append(call.index)):
        run_all(*(lambda: [model(X) for _ in range(200)] for _ in range(4)))
    assert sorted(seen) == list(range(800))


def test_hooks_come_and_go_while_other_threads_run_the_model(hasty):
    model = small()
    expected = model(X)
    stop = threading.Event()

    def forward():
        count = 0
        while not stop.is_set():
            assert torch.equal(model(X), expected)
            count += 1
        return count

    def come_and_go():
        try:
            for _ in range(150):
                with hl.capture(model, "0", "2:input", "**") as record:
                    model(X)
                assert len(record.calls("0")) == 1
                handle = hl.capture(model, "0:input", "2", "2:grad_output").attach()
                second = hl.edit(model, {"0:input": hl.scale(1.0), "1": hl.add(0.0)}).attach()
                handle.remove()
                second.remove()
        finally:
            stop.set()

    run_all(forward, forward, come_and_go)
    assert_clean(model)


def test_threads_register_and_remove_on_the_same_modules_at_the_same_time(hasty):
    model = small()

    def come_and_go():
        for _ in range(100):
            with hl.capture(model, "**", "0:input", "0.weight:grad") as record:
                model(X).sum().backward()
            assert len(record.calls("0")) == 1

    run_all(*[come_and_go] * 3)
    assert_clean(model)


def test_an_attachment_can_be_removed_by_another_thread():
    model = small()
    handle = hl.capture(model, "0", "0.weight:grad").attach()
    model(X)
    in_thread(handle.remove)
    model(X)
    assert len(handle.record.calls("0")) == 1
    assert_clean(model)


@pytest.mark.parametrize(
    "make",
    [
        lambda m: hl.capture(m, "0"),
        lambda m: hl.edit(m, "0", hl.zero()),
        lambda m: hl.edit(m, "0.weight", hl.zero()),
    ],
    ids=["capture", "edit", "edit of a parameter"],
)
def test_a_block_that_is_left_in_another_thread_leaves_nothing(make):
    model = small()
    before = model[0].weight.detach().clone()
    context = make(model)

    def leave_elsewhere():  # in a thread of its own: torch's saved-tensor hooks stay in it
        context.__enter__()
        model(X)
        in_thread(context.__exit__, None, None, None)
        assert torch.equal(model[0].weight, before)
        assert_clean(model)
        model(X).sum().backward()

    in_thread(leave_elsewhere)


# -- tasks and executors --------------------------------------------------------------------------


def test_two_tasks_capture_at_the_same_time_and_each_sees_its_own():
    model = small()

    async def work(shift):
        with hl.capture(model, "0:input", "2") as record:
            for n in range(5):
                model(X + shift + n)
                await asyncio.sleep(0)
        assert len(record.calls("2")) == 5
        for n, value in enumerate(record.calls("0:input")):
            assert torch.equal(value, X + shift + n)

    async def main():
        await asyncio.gather(work(100), work(200), work(300))

    asyncio.run(main())
    assert_clean(model)


def test_threads_all_sees_the_calls_of_other_tasks():
    model = small()

    async def bystander():
        model(X)

    async def main(threads):
        other = asyncio.create_task(bystander())
        with hl.capture(model, "0", threads=threads) as record:
            model(X)
            await other
        return len(record.calls("0"))

    assert asyncio.run(main("all")) == 2
    assert asyncio.run(main("own")) == 1


def test_tasks_that_are_started_inside_the_block_belong_to_it():
    model = small()

    async def work():
        model(X)

    async def main():
        with hl.capture(model, "0") as record:
            await asyncio.gather(work(), work())
            await asyncio.to_thread(model, X)
        return record

    assert len(asyncio.run(main()).calls("0")) == 3


def test_an_executor_does_not_belong_to_the_block_unless_it_is_given_the_context():
    model = small()
    with ThreadPoolExecutor(1) as executor, hl.capture(model, "0") as record:
        model(X)
        executor.submit(model, X).result()
        assert len(record.calls("0")) == 1
        executor.submit(contextvars.copy_context().run, model, X).result()
        assert len(record.calls("0")) == 2
    assert_clean(model)


@pytest.mark.parametrize("place", ["0", "0.weight"])
def test_a_block_that_is_left_in_another_task_leaves_nothing(place):
    model = small()
    before = model[0].weight.detach().clone()
    watch = hl.capture(model, "0", "0:input")
    change = hl.edit(model, place, hl.zero())

    async def enter():
        record = watch.__enter__()
        change.__enter__()
        model(X)
        return record

    async def leave():
        change.__exit__(None, None, None)
        watch.__exit__(None, None, None)

    async def main():
        record = await asyncio.create_task(enter())
        await asyncio.create_task(leave())
        model(X)
        return record

    record = asyncio.run(main())
    assert len(record.calls("0")) == 1
    assert torch.equal(model[0].weight, before)
    assert_clean(model)


def test_a_generator_that_is_closed_by_another_task_leaves_nothing():
    model = small()

    async def captured():
        with hl.capture(model, "0") as record:
            for n in range(3):
                model(X + n)
                yield record

    async def main():
        stream = captured()
        record = await anext(stream)
        await asyncio.create_task(stream.aclose())
        return record

    record = asyncio.run(main())
    assert len(record.calls("0")) == 1
    assert_clean(model)


def test_a_backward_in_another_thread_delivers_its_gradients():
    model = small()
    with hl.capture(model, "2:grad_output", "0:grad_input", "0.weight:grad") as record:
        loss = model(X.clone().requires_grad_()).sum()
        in_thread(loss.backward)
    assert torch.equal(record["2:grad_output"], torch.ones(4, 2))
    assert torch.equal(record["0.weight:grad"], model[0].weight.grad)
    assert record["0:grad_input"].shape == X.shape
    assert_clean(model)


@pytest.mark.parametrize("while_open", [True, False], ids=["open", "closed"])
@pytest.mark.parametrize("port", ["", ":grad_output"])
def test_several_threads_may_be_the_first_to_read_a_record(hasty, port, while_open):
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(10)])

    def read():
        return [len(record.calls(f"{n}{port}")) for n in range(10)]

    with hl.capture(model, f"*{port}") as record:
        for _ in range(50):
            model(X).sum().backward()
        found = run_all(read, read, read, read) if while_open else []
    found += run_all(read, read, read, read)
    assert all(counts == [50] * 10 for counts in found)


@pytest.mark.parametrize("port", ["grad_output", "grad_input"])
def test_calls_that_raise_in_threads_of_one_context_do_not_take_others_away(hasty, port):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            y = self.last(self.first(x))
            with contextlib.suppress(TypeError):
                self.last(None)
            return y

    model = Model()

    def work():
        for _ in range(40):
            model(X.clone().requires_grad_() * 1).sum().backward()

    with hl.capture(model, f"**:{port}") as record:
        contexts = [contextvars.copy_context() for _ in range(4)]
        run_all(*[functools.partial(context.run, work) for context in contexts])
    for name in ("first", "last"):
        grads = record.calls(f"{name}:{port}")
        assert len(grads) == 160
        assert all(grad is not None for grad in grads)


@pytest.mark.parametrize("threads", ["own", "all"])
def test_operations_of_a_call_from_another_thread_are_said_to_be_out_of_sight(threads):
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.randn(1, 2)
    looking = hl.capture(model, "0/linear", threads=threads)
    for context in (hl.edit(model, "0/linear", hl.zero()), looking):
        said = pytest.raises(
            hl.NeverFired, match=r"(?s)called 1×.* another.* operations .*(not|never) seen"
        )
        with ThreadPoolExecutor(1) as pool, said, context:
            pool.submit(model, x).result()
    assert_clean(model)


def test_an_edit_of_a_parameter_that_is_left_in_another_thread_leaves_no_hooks_in_this_one():
    model, x = nn.Linear(2, 2), torch.randn(3, 2)
    before = model.weight.detach().clone()
    context = hl.edit(model, "weight", hl.scale(2.0))
    context.__enter__()
    model(x)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(context.__exit__, None, None, None).result()
    assert torch.equal(model.weight, before)
    model(x).sum().backward()  # what is saved here first takes them off
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch.func.grad(lambda value: model(value).sum())(x).shape == x.shape
    assert_clean(model)


@pytest.mark.parametrize("threads", ["own", "all"])
def test_an_operation_in_another_thread_is_told_also_beside_its_module(threads):
    class Doubling(nn.Module):
        def forward(self, x):
            return x.mul(2)

    model = Doubling()
    capture = hl.capture(model, "/mul", "", threads=threads)
    with pytest.raises(hl.NeverFired, match="another"), capture:
        in_thread(model, torch.ones(2))
    assert_clean(model)
