"""Shared, recursive, generator and async modules: calls are numbered and paired."""

import torch
from models import Failing, Recursive, small
from oracles import assert_clean
from torch import nn

import hookline as hl

X = torch.arange(12.0).reshape(4, 3) / 10


def test_one_module_under_two_names_is_one_place_with_two_calls():
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, layer)
    with hl.capture(model, "*", "1:input") as record:
        out = model(X)
    assert record.places() == ["0", "0:input"]
    assert len(record.calls("0")) == len(record.calls("1")) == 2
    assert torch.equal(record["1", 1], out)
    assert torch.equal(record["0:input", 1], record["0", 0])
    assert_clean(model)


def test_tied_weights_of_two_modules_are_two_places():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    with hl.capture(model, "*", "0.weight:grad") as record:
        model(X).sum().backward()
    assert record.places() == ["0", "0.weight:grad", "1"]
    assert torch.equal(record["0.weight:grad"], model[0].weight.grad)


def test_a_cell_in_a_loop_gives_one_call_a_step():
    cell = nn.LSTMCell(3, 2)
    state, states = None, []
    with hl.capture(cell, "", ":inputs", "[0]", ":inputs[hx][0]") as record:
        for _ in range(5):
            state = cell(X, state)
            states.append(state)
    assert len(record.calls("")) == len(record.calls(":inputs")) == 5
    assert all(torch.equal(a, b) for a, (b, _) in zip(record.calls("[0]"), states, strict=True))
    hidden = record.calls(":inputs[hx][0]")
    assert torch.equal(hidden[-1], states[3][0])


def test_inputs_and_outputs_of_a_recursive_module_pair_up():
    model = Recursive()
    with hl.capture(model, ":inputs", "", "lin") as record:
        model(X, depth=3)
    inputs, outputs = record.calls(":inputs"), record.calls("")
    assert [given.get("depth", 0) for given in inputs] == [0, 1, 2, 3]
    for given, out in zip(inputs, outputs, strict=True):
        assert torch.equal(model(**given), out)
    assert len(record.calls("lin")) == 1
    assert_clean(model)


def test_inputs_and_outputs_pair_up_when_an_inner_call_raises_and_is_caught():
    class Trying(nn.Module):
        def forward(self, depth):
            if depth == 0:
                raise ValueError
            try:
                self(depth - 1)
            except ValueError:
                return depth * 10
            return depth * 100

    model = Trying()
    with hl.capture(model, ":input", "") as record:
        model(3)
    pairs = list(zip(record.calls(":input"), record.calls(""), strict=False))
    assert pairs == [(1, 10), (2, 200), (3, 300)]
    assert_clean(model)


def test_inputs_and_outputs_pair_up_when_a_call_raises_and_is_tried_again():
    class Retry(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Failing(ValueError())

        def forward(self, x):
            try:
                return self.inner(x)
            except ValueError:
                self.inner.error = None
                return self.inner(x + 1)

    model = Retry()
    with hl.capture(model, "inner:input", "inner", "inner.first:input", "inner.first") as record:
        model(X)
    assert torch.equal(record["inner:input", 0], X + 1)
    assert len(record.calls("inner")) == 1
    assert len(record.calls("inner.first")) == len(record.calls("inner.first:input")) == 2
    assert torch.equal(record["inner.first:input", 0], X)
    assert_clean(model)


def test_a_context_entered_while_a_module_runs_keeps_inputs_and_outputs_paired():
    model, handles = small(), []

    def enter(m, args, out):
        if not handles:
            handles.append(hl.capture(model, "", ":input").attach())

    handle = model[0].register_forward_hook(enter)
    model(X), model(X + 1)
    handles[0].remove()
    handle.remove()
    record = handles[0].record
    assert torch.equal(record.calls(":input")[-1], X + 1)
    assert torch.equal(record.calls("")[-1], model(X + 1))
    assert_clean(model)


def test_a_module_may_use_hookline_inside_its_own_forward():
    class Inward(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x):
            with hl.capture(self, "lin") as record:
                self.lin(x)
            return record["lin"] * 2

    model = Inward()
    with hl.capture(model, "", "lin") as record:
        out = model(X)
    assert torch.equal(out, model.lin(X) * 2)
    assert torch.equal(record["lin"], model.lin(X))
    assert_clean(model)


def test_a_generator_forward_is_left_alone_and_its_modules_are_captured_as_they_run():
    class Stream(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x):
            for row in x:
                yield self.lin(row)

    model = Stream()
    with hl.capture(model, "", ":input", "lin") as record:
        stream = model(X)
        assert "lin" not in record
        rows = list(stream)
    assert record[""] is stream
    assert len(record.calls("lin")) == 4
    assert all(torch.equal(a, b) for a, b in zip(rows, record.calls("lin"), strict=True))
    assert_clean(model)


def test_an_async_forward_is_captured_as_it_is_awaited():
    import asyncio

    class Async(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)

        async def forward(self, x):
            await asyncio.sleep(0)
            return self.lin(x)

    model = Async()

    async def main():
        with hl.capture(model, ":input", "lin") as record:
            one = await model(X)
            two, three = await asyncio.gather(model(X + 1), model(X + 2))
        return record, [one, two, three]

    record, outs = asyncio.run(main())
    assert len(record.calls(":input")) == 3
    assert all(torch.equal(a, b) for a, b in zip(outs, record.calls("lin"), strict=True))
    assert_clean(model)
