"""Captures of some calls: `capture(..., calls=)`."""

import contextlib
import gc
import json
import re
import threading
import weakref

import pytest
import torch
from oracles import assert_clean
from torch import nn

import hookline as hl

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class CallsOneFiveTimes(nn.Module):
    """A layer that is called five times, in ways that tell the calls apart."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        self.act = nn.Tanh()

    def forward(self, x):
        for n in range(5):
            x = self.act(self.layer(x + n))
        return x.sigmoid()


PORTS = ("", ":input", ":inputs", ":inputs[input]", ":grad_output", ":grad_input")
CHOICES = [
    (3, [3]),
    ({1, 3}, [1, 3]),
    ([4, 0], [0, 4]),
    (slice(1, None), [1, 2, 3, 4]),
    (slice(None, None, 2), [0, 2, 4]),
    (slice(3, 99), [3, 4]),
]


def forward_and_backward_of(model, x=X):
    model(x.clone().requires_grad_()).sum().backward()


def alike(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[k], other[k]) for k in one)
    return torch.equal(one, other)


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize(("calls", "numbers"), CHOICES)
@pytest.mark.parametrize("threads", ["own", "all"])
def test_the_calls_that_were_asked_for_are_kept_under_their_numbers(port, calls, numbers, threads):
    model, place = CallsOneFiveTimes(), "layer" + port
    with hl.capture(model, place) as whole:
        forward_and_backward_of(model)
    with hl.capture(model, place, calls=calls, threads=threads) as record:
        forward_and_backward_of(model)
    assert [n for n, _ in record.numbered(place)] == numbers
    assert len(record.calls(place)) == len(numbers)
    for n in range(5):
        assert ((place, n) in record) is (n in numbers)
        if n in numbers:
            assert alike(record[place, n], whole[place, n])
        else:
            with pytest.raises(
                hl.NotCaptured, match=rf"Call {n} at .*{re.escape(port)}.*capture was for others"
            ):
                _ = record[place, n]
    assert alike(record[place, -1], whole[place, numbers[-1]])
    assert_clean(model)


@pytest.mark.parametrize("keep", ["first", "last"])
@pytest.mark.parametrize("port", PORTS)
def test_keep_chooses_among_the_calls_that_were_asked_for(keep, port):
    model, place = CallsOneFiveTimes(), "layer" + port
    with hl.capture(model, place) as whole:
        forward_and_backward_of(model)
    with hl.capture(model, place, calls={1, 2, 3}, keep=keep) as record:
        forward_and_backward_of(model)
    number = 1 if keep == "first" else 3
    assert alike(record[place], whole[place, number])
    assert alike(record[place, number], whole[place, number])
    with pytest.raises(hl.NotCaptured):
        _ = record[place, 0]


def test_other_options_meet_only_the_calls_that_were_asked_for():
    model, met = CallsOneFiveTimes(), []

    def first_row(value):
        met.append(None)
        return value[0]

    options = {"transform": first_row, "at": slice(1, None), "dtype": torch.float64, "detach": True}
    with hl.capture(model, "layer", "act:input", calls={2, 4}, **options) as record:
        forward_and_backward_of(model)
    assert len(met) == 4
    with hl.capture(model, "layer", detach=True) as whole:
        forward_and_backward_of(model)
    assert torch.equal(record["layer", 4], whole["layer", 4][1].double())
    assert record.stack("layer").shape == record.stack("act:input").shape == (2, 3)
    assert record.cat("layer").shape == (6,)


def test_one_call_reads_without_its_number():
    model = CallsOneFiveTimes()
    with hl.capture(model, "layer", calls=3) as record:
        forward_and_backward_of(model)
    assert torch.equal(record["layer"], record["layer", 3])
    assert torch.equal(record.tensor("layer"), record["layer", 3])
    assert [place for place, _ in record.items()] == ["layer"]


def test_the_table_says_which_calls_there_are():
    model = CallsOneFiveTimes()
    with hl.capture(model, "layer", "act:grad_output", calls={0, 1, 3}) as record:
        forward_and_backward_of(model)
    assert "3 (0-1, 3)" in repr(record)
    assert repr(record).count("(0-1, 3)") == 2


@pytest.mark.parametrize("place", ["/sigmoid", "act/tanh", "layer/linear:input"])
def test_operations_are_captured_at_some_calls(place):
    model = CallsOneFiveTimes()
    with hl.capture(model, place) as whole:
        forward_and_backward_of(model), forward_and_backward_of(model)
    with hl.capture(model, place, calls=1) as record:
        forward_and_backward_of(model), forward_and_backward_of(model)
    assert torch.equal(record[place, 1], whole[place, 1])
    with pytest.raises(hl.NotCaptured, match=r"Call 0 .* capture was for others"):
        _ = record[place, 0]


def test_parameters_are_captured_at_some_calls_and_their_gradients_at_some_backwards():
    model = CallsOneFiveTimes()
    with hl.capture(model, "layer.weight:grad") as whole:
        for n in range(3):
            forward_and_backward_of(model, X * n)
    places = ("layer.weight:grad", "layer.weight")
    with hl.capture(model, *places, calls={1, 2}) as record:
        for n in range(3):
            forward_and_backward_of(model, X * n)
    for n in (1, 2):
        assert torch.equal(record["layer.weight:grad", n], whole["layer.weight:grad", n])
    assert [n for n, _ in record.numbered("layer.weight")] == [1, 2]
    with pytest.raises(hl.NotCaptured, match="capture was for others"):
        _ = record["layer.weight:grad", 0]


def test_a_tensor_has_some_of_its_gradients_captured():
    x = X.clone().requires_grad_()
    with hl.capture(x, ":grad", calls=1) as record:
        for n in range(3):
            (x * n).sum().backward()
    assert torch.equal(record[":grad"], torch.ones_like(x))
    assert torch.equal(record[":grad", 1], torch.ones_like(x))


def test_several_backwards_of_one_call_are_read_together():
    model = CallsOneFiveTimes()
    with hl.capture(model, "layer:grad_output", calls=2) as record:
        loss = model(X).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert [n for n, _ in record.numbered("layer:grad_output")] == [2, 2]
    with pytest.raises(hl.SeveralCalls, match="2 gradients"):
        _ = record["layer:grad_output", 2]


@pytest.mark.parametrize("port", PORTS)
def test_a_call_that_never_came_is_told_at_exit_and_on_reading(port):
    model, place = CallsOneFiveTimes(), "layer" + port
    with pytest.raises(hl.NeverFired, match=r"it did not at call 7: .*called 5×"):
        with hl.capture(model, place, calls=7):
            forward_and_backward_of(model)
    with pytest.raises(
        hl.NeverFired, match=r"did at call 1, .*not at call 7: .*called 5×"
    ) as caught:
        with hl.capture(model, place, calls={1, 7}) as record:
            forward_and_backward_of(model)
    assert caught.value.record is record
    assert alike(record[place], record[place, 1])
    with pytest.raises(hl.NotCaptured, match=r"Call 7 .*never came"):
        _ = record[place, 7]


def test_calls_that_came_without_a_gradient_are_not_said_to_be_missing():
    model = CallsOneFiveTimes()
    with pytest.raises(
        hl.NeverFired, match=r"did not at calls 0, 2: no gradient .*Run the forward"
    ):
        with hl.edit(model, "layer:grad_output", hl.scale(2.0), calls={0, 2}):
            model(X)


@pytest.mark.parametrize("place", ["layer:grad_output", "layer.weight:grad"])
def test_gradients_that_came_at_other_calls_are_not_said_to_be_missing(place):
    model = CallsOneFiveTimes()
    with hl.capture(model, place, calls=slice(9, None)) as record:
        forward_and_backward_of(model)
    with pytest.raises(hl.GradientNotAvailable, match=r"came 1×|called 5×") as caught:
        _ = record[place]
    assert "calls= names others" in str(caught.value)
    assert "No backward" not in str(caught.value)
    with pytest.raises(hl.NeverFired, match="calls= names others"):
        with hl.edit(model, place, hl.scale(2.0), calls=slice(9, None)):
            forward_and_backward_of(model)


def test_a_call_without_the_part_is_not_named_among_those_that_were_kept():
    class Pairs(nn.Module):
        def forward(self, x, n):
            return (x,) if n == 1 else (x, x * n)

    model = Pairs()
    with hl.capture(model, "[1]", calls={0, 1, 3}) as record:
        for n in range(4):
            model(X, n)
    with pytest.raises(hl.NotCaptured, match=r"Read one of those that were kept: 0, 3\."):
        _ = record["[1]", 2]


def test_of_a_glob_one_place_must_have_the_calls():
    model = nn.Sequential(CallsOneFiveTimes(), nn.Tanh())
    with hl.capture(model, "0.*", "{0.act,1}", calls=4) as record:
        forward_and_backward_of(model)
    assert list(record.unfired()) == ["1"]
    assert "calls= names others" in record.unfired()["1"]
    with pytest.raises(hl.NeverFired, match="called 1×"):
        _ = record["1"]


def test_nothing_is_kept_of_calls_that_were_not_asked_for():
    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.made = nn.Identity(), []

        def forward(self, x):
            value = torch.full((64, 64), float(x), requires_grad=True).mul(1)
            self.made.append(weakref.ref(value))
            return self.inner(value).sum()

    model = Watched()
    for place in ("inner", "inner:input", "inner:inputs"):
        model.made.clear()
        with hl.capture(model, place, calls={2}) as record:
            for n in range(5):
                model(n)
        gc.collect()
        assert [ref() is not None for ref in model.made] == [n == 2 for n in range(5)]
        assert record.nbytes == 64 * 64 * 4


def test_stop_ends_the_forward_also_where_only_the_first_call_is_kept():
    model, ran = CallsOneFiveTimes(), []
    model.layer.register_forward_hook(lambda *call: ran.append(call))
    with hl.capture(model, "layer", calls={0, 2}, keep="first", stop=True) as record:
        model(X)
    assert len(ran) == 3
    assert [n for n, _ in record.numbered("layer")] == [0]


def test_stop_ends_the_forward_at_the_last_call_that_was_named():
    for place in ("layer", "layer:input"):
        model, seen = CallsOneFiveTimes(), []
        model.act.register_forward_hook(lambda *_, seen=seen: seen.append(None))
        with hl.capture(model, place, calls={1, 3}, stop=True) as record:
            model(X)
            raise AssertionError("the rest of the block must not run")
        assert len(seen) == 3
        assert [n for n, _ in record.numbered(place)] == [1, 3]


@pytest.mark.parametrize("threads", ["own", "all"])
@pytest.mark.parametrize(("keep", "calls", "number"), [("first", {1, 2}, 1), ("last", {0, 1}, 1)])
def test_the_first_and_the_last_of_nested_calls_go_by_their_numbers(keep, calls, number, threads):
    class Nested(nn.Module):
        def forward(self, x, depth=0):
            return x + self(x + 1, depth + 1) if depth < 2 else x

    model = Nested()
    with hl.capture(model, ":input", calls=calls, keep=keep, threads=threads) as record:
        model(X)
    ((kept, value),) = record.numbered(":input")
    assert kept == number
    assert torch.equal(value, X + number)


def test_inputs_are_numbered_by_the_start_of_the_call_as_in_edits():
    class Recursive(nn.Module):
        def forward(self, x, depth):
            return self(x + 1, depth - 1) * 2 if depth else x

    model = Recursive()
    with hl.capture(model, "") as whole:
        model(X, 3)
    for n in range(4):
        with hl.capture(model, "", ":inputs[x]", calls=n) as record:
            model(X, 3)
        assert torch.equal(record["", n], whole["", n])
        assert torch.equal(record[":inputs[x]", n], X + n)


def test_the_input_of_a_call_that_raised_is_kept_if_it_was_asked_for():
    class Raising(nn.Module):
        def forward(self, x):
            raise KeyError("no")

    model = Raising()
    with hl.capture(model, ":input", calls=0) as record, pytest.raises(KeyError):
        model(X)
    assert torch.equal(record[":input", 0], X)


def test_an_attached_capture_of_some_calls_goes_on_until_it_is_removed():
    model = CallsOneFiveTimes()
    handle = hl.capture(model, "layer", calls=slice(3, 7)).attach()
    forward_and_backward_of(model), forward_and_backward_of(model)
    handle.remove()
    assert [n for n, _ in handle.record.numbered("layer")] == [3, 4, 5, 6]
    assert_clean(model)


def test_calls_of_other_threads_are_not_counted():
    model = CallsOneFiveTimes()
    with hl.capture(model, "layer", calls={5}) as record:
        forward_and_backward_of(model)
        thread = threading.Thread(target=forward_and_backward_of, args=(model, X * 3))
        thread.start()
        thread.join()
        forward_and_backward_of(model, X * 2)
    with hl.capture(model, "layer") as whole:
        forward_and_backward_of(model, X * 2)
    assert torch.equal(record["layer", 5], whole["layer", 0])


def test_a_patch_takes_the_call_of_the_same_number():
    model = CallsOneFiveTimes()
    with hl.capture(model, "layer", calls=3) as clean:
        model(X)
    with hl.edit(model, "layer", hl.patch(clean), calls=3):
        with hl.capture(model, "layer", calls=3) as record:
            model(X * 2)
    assert torch.equal(record["layer"], clean["layer"])
    with pytest.raises(hl.NotCaptured, match="0 values of that call"):
        with hl.edit(model, "layer", hl.patch(clean)):
            model(X)


def test_a_saved_record_has_the_numbers_of_the_calls(tmp_path):
    model = CallsOneFiveTimes()
    with hl.capture(model, "layer", "layer:grad_output", "/sigmoid", calls={0, 3}) as record:
        for _ in range(4):
            forward_and_backward_of(model)
    found = hl.load_record(hl.save_record(record, tmp_path))
    assert (
        repr(found).replace("attached", "").split() == repr(record).replace("attached", "").split()
    )
    for place in ("layer", "layer:grad_output", "/sigmoid"):
        assert [n for n, _ in found.numbered(place)] == [0, 3]
        assert torch.equal(found[place, 3], record[place, 3])
        with pytest.raises(hl.NotCaptured, match=r"Call 1 .*capture was for others"):
            _ = found[place, 1]


@pytest.mark.parametrize("numbers", [[0], [0, "1"], [1, 0], [-1, 3], 3, None])
def test_a_record_whose_numbers_are_none_is_refused(tmp_path, numbers):
    model = CallsOneFiveTimes()
    with hl.capture(model, "layer", calls={0, 3}) as record:
        forward_and_backward_of(model)
    folder = hl.save_record(record, tmp_path)
    content = json.loads((folder / "record.json").read_text())
    assert content["places"][0]["numbers"] == [0, 3]
    content["places"][0]["numbers"] = numbers
    (folder / "record.json").write_text(json.dumps(content))
    with pytest.raises(hl.errors.RecordError):
        hl.load_record(folder)


def test_a_record_of_no_calls_at_a_place_is_read(tmp_path):
    model = CallsOneFiveTimes()
    with hl.capture(model, "layer", calls={0, 3}) as record:
        forward_and_backward_of(model)
    folder = hl.save_record(record, tmp_path)
    content = json.loads((folder / "record.json").read_text())
    content["places"][0] |= {"numbers": [], "calls": []}
    (folder / "record.json").write_text(json.dumps(content))
    assert hl.load_record(folder).places() == []


def test_a_page_labels_the_calls_with_their_numbers():
    from hookline.view.page_tree import PageTree
    from hookline.view.record_pages import add_record

    model = CallsOneFiveTimes()
    with hl.capture(model, "layer", calls={1, 3}) as record:
        forward_and_backward_of(model)
    outline = PageTree()
    add_record(outline, record, 1000)
    (chunk,) = [make() for make in outline.chunks.values()]
    assert [item["label"] for item in chunk.meta["items"]] == ["1", "3"]
    assert outline.entries[0].count == 4


@pytest.mark.parametrize("calls", [-1, slice(-1, None), {-1}, "0", "prompts", 1.5, [], True])
def test_calls_that_make_no_sense_are_refused(calls):
    with pytest.raises((hl.ChangeError, TypeError), match="calls"):
        hl.capture(CallsOneFiveTimes(), "layer", calls=calls)


def test_a_record_moved_to_another_device_keeps_the_numbers():
    model = CallsOneFiveTimes()
    with hl.capture(model, "layer", "layer:grad_output", calls={1, 3}) as record:
        forward_and_backward_of(model)
    moved = record.to("cpu")
    for place in ("layer", "layer:grad_output"):
        assert [n for n, _ in moved.numbered(place)] == [1, 3]
        assert torch.equal(moved[place, 3], record[place, 3])


class Failing(nn.Module):
    """Raises in its first calls, then returns its input."""

    def __init__(self, times):
        super().__init__()
        self.left = times

    def forward(self, x):
        self.left -= 1
        if self.left >= 0:
            raise ValueError("not yet")
        return x


@pytest.mark.parametrize("calls", [0, slice(0, 2)])
@pytest.mark.parametrize("failures", [1, 3])
def test_a_number_is_kept_once_though_calls_raise_and_are_tried_again(failures, calls):
    model = nn.Sequential(Failing(failures))
    inputs = [torch.full((2,), float(n)) for n in range(3)]
    with hl.capture(model, "0:input", calls=calls) as record:
        for x in inputs:
            with contextlib.suppress(ValueError):
                model(x)
    # The first complete call has the number 0; without one, the first attempt has it.
    assert torch.equal(record["0:input", 0], inputs[failures % 3])
    numbers = [number for number, _ in record.numbered("0:input")]
    assert numbers == sorted(set(numbers))


def test_a_call_equals_itself_only():
    model, calls = nn.Identity(), []
    with hl.hook(model, "", lambda value, call: calls.append(call)):
        model(torch.ones(1)), model(torch.ones(1))
    first, second = calls
    assert (first == first, first == second, first == 0) == (True, False, False)


def test_inputs_of_calls_that_raised_are_kept_beside_those_of_the_others():
    model = nn.Sequential(Failing(1))
    inputs = [torch.full((2,), float(n)) for n in range(3)]
    with hl.capture(model, "0:input") as record:
        for x in inputs:
            with contextlib.suppress(ValueError):
                model(x)
    kept = [float(value[0]) for value in record.calls("0:input")]
    assert kept == [1.0, 2.0, 0.0]  # complete calls come first


def test_an_edit_of_some_calls_may_name_a_parameter_beside_a_module():
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    x, outputs = torch.ones(1, 2), []
    plain = model(x)
    with hl.edit(model, ["0", "0.weight"], hl.scale(2.0), calls=1):
        outputs = [model(x), model(x), model(x)]
    for output, factor in zip(outputs, (2, 4, 2), strict=True):
        torch.testing.assert_close(output, plain * factor)
