"""Copied, saved and sent models: they never write into the original's record, and end up clean."""

import copy
import gc
import io
import multiprocessing
import pickle
import weakref

import pytest
import torch
from models import small
from oracles import HOOK_DICTS, assert_clean
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hookline as hl

X = torch.arange(12.0).reshape(4, 3) / 10


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def by_saving(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS = {"deepcopy": copy.deepcopy, "pickle": by_pickle, "torch.save": by_saving}
every_way = pytest.mark.parametrize("duplicate", WAYS.values(), ids=WAYS.keys())

CONTEXTS = {
    "plain capture": lambda m: hl.capture(m, "**"),
    "capture": lambda m: hl.capture(m, "**", "**:inputs", "0.weight", "0.weight:grad"),
    "capture of all threads": lambda m: hl.capture(m, "**", threads="all"),
    "capture of last calls": lambda m: hl.capture(m, "**", keep="last"),
    "gradients": lambda m: hl.capture(m, "**:grad_output", "**:grad_input", "**.weight:grad"),
    "edit": lambda m: hl.edit(m, ["0", "2:input"], lambda value: value * 2),
    "edit of gradients": lambda m: hl.edit(m, "2:grad_output", hl.scale(2.0)),
    "edit of a parameter": lambda m: hl.edit(m, "0.weight", hl.scale(2.0)),
    "hook": lambda m: hl.hook(m, ["0", "0:input"], lambda value: None),
}
every_context = pytest.mark.parametrize("make", CONTEXTS.values(), ids=CONTEXTS.keys())


@every_way
@every_context
def test_a_copy_made_inside_a_context_acts_as_if_it_was_never_hooked(make, duplicate):
    model = small()
    with make(model):
        other = duplicate(model)
        bare = small()
        bare.load_state_dict(other.state_dict())
        x = X.clone().requires_grad_()
        assert torch.equal(other(x), bare(x))
        ours = torch.autograd.grad(other(x).sum(), [x, *other.parameters()])
        theirs = torch.autograd.grad(bare(x).sum(), [x, *bare.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert hl.attached(other) == []
        model(x).sum().backward()
    other(X)
    assert_clean(model, other)


@every_way
@pytest.mark.parametrize("way", ["with", "attach", "threads"])
@pytest.mark.parametrize("places", [["**"], ["**", "**:input"], ["**", "**:grad_output"]])
def test_calls_of_a_copy_are_not_in_the_record_of_the_original(duplicate, way, places):
    model = small()
    context = hl.capture(model, *places, threads="all" if way == "threads" else "own")
    record = context.attach().record if way == "attach" else context.__enter__()
    other = duplicate(model)
    other(X + 1).sum().backward()
    model(X).sum().backward()
    other(X + 2).sum().backward()
    assert all(len(record.calls(place)) == 1 for place in record.places())
    assert torch.equal(record["0"], model[0](X))
    context.remove()
    other(X)
    assert_clean(model, other)


@every_way
def test_a_copy_can_be_hooked_while_the_original_is(duplicate):
    model = small()
    with hl.capture(model, "0", "0:input") as record:
        other = duplicate(model)
        with hl.capture(other, "0", "0:input") as second, hl.edit(other, "0", hl.zero()):
            other(X + 1)
        model(X)
        assert torch.equal(second["0:input"], X + 1)
        assert torch.equal(record["0:input"], X)
    other(X)
    assert_clean(model, other)


@every_way
def test_a_copy_of_a_copy_ends_up_clean(duplicate):
    model = small()
    with hl.capture(model, "**", "**:input") as record:
        other = duplicate(duplicate(model))
        other(X)
        model(X)
    assert len(record.calls("0")) == 1
    assert_clean(model, other)


def test_the_copy_of_a_module_alone_ends_up_clean():
    model = small()
    with hl.capture(model, "0", "0:input") as record:
        layer = copy.deepcopy(model[0])
        layer(X)
        model(X)
    assert len(record.calls("0")) == 1
    assert_clean(model, layer)


def test_hooks_of_the_user_survive_in_a_copy():
    model, seen = small(), []
    handle = model[0].register_forward_hook(lambda m, a, o: seen.append(m))
    with hl.capture(model, "0", "0:input"):
        other = copy.deepcopy(model)
        other(X)
        model(X)
    assert seen == [other[0], model[0]]
    other(X)
    assert seen == [other[0], model[0], other[0]]
    handle.remove()
    assert_clean(model)


def test_a_shallow_copy_does_not_write_into_the_record_of_the_original():
    model = small()
    with hl.capture(model, "", ":input", "0") as record:
        other = copy.copy(model)
        other(X + 1)
        model(X)
    assert torch.equal(record[""], model(X))
    assert torch.equal(record[":input"], X)
    assert len(record.calls("0")) == 2  # the children are the same objects
    assert_clean(model, other)


def test_an_edit_of_a_model_does_not_reach_its_shallow_copy():
    model = nn.Identity()
    with hl.edit(model, "", hl.zero()):
        other = copy.copy(model)
        assert torch.equal(other(X), X)
        assert not model(X).any()
    assert_clean(model, other)


@every_way
def test_a_model_that_keeps_its_own_handle_can_be_copied(duplicate):
    model = small()
    model.handle = hl.capture(model, "0", "2:grad_output").attach()
    model.change = hl.edit(model, "0", lambda value: value + 1).attach()
    model(X).sum().backward()
    other = duplicate(model)
    assert not other(X).equal(model(X))
    assert len(model.handle.record.calls("0")) == 2
    other.handle.remove()
    other.change.remove()
    repr(other.handle)
    del other.handle, other.change
    gc.collect()
    assert hl.attached(model) == [model.handle, model.change]
    hl.attached(model).remove()
    assert_clean(model, other)


def test_the_handle_in_a_copy_says_that_it_is_one():
    model = small()
    model.handle = hl.capture(model, "0").attach()
    other = copy.deepcopy(model)
    assert "open" not in repr(other.handle)
    with pytest.raises(RuntimeError, match=r"cop(y|ied)"):
        other.handle.attach()
    with pytest.raises(RuntimeError, match=r"cop(y|ied)"), other.handle:
        pass
    del other
    gc.collect()
    model.handle.remove()
    assert_clean(model)


def test_the_state_of_a_hooked_model_is_that_of_the_bare_one():
    model = small()
    keys = list(model.state_dict())
    with hl.capture(model, "**", "**:grad_output", "**.weight:grad"):
        model(X).sum().backward()
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        assert list(torch.load(buffer, weights_only=True)) == keys
        model.load_state_dict(model.state_dict())
        assert repr(model) == repr(small())


def test_what_is_in_a_record_can_be_saved():
    model = small()
    with hl.capture(model, "0", "2:grad_output", detach=True) as record:
        model(X).sum().backward()
    buffer = io.BytesIO()
    torch.save(dict(record.items()), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded["0"], record["0"])


def test_a_copy_keeps_nothing_of_the_original_alive():
    model = small()
    with hl.capture(model, "**", "**:input") as record:
        other = copy.deepcopy(model)
        model(X)
    gone = weakref.ref(model)
    del model, record
    assert gone() is None
    other(X)
    assert_clean(other)


def test_replicas_that_share_the_hook_dicts_do_not_write_into_the_record():
    model = nn.Linear(3, 3)
    with hl.capture(model, "", ":input", threads="all") as record:
        replica = model._replicate_for_data_parallel()
        for name, parameter in model.named_parameters():
            setattr(replica, name, parameter.detach() + 1)
        replica(X)
        model(X)
    assert len(record.calls("")) == len(record.calls(":input")) == 1
    assert_clean(model)


@pytest.mark.parametrize("places", [["0", "1"], ["**"], ["1", "**", "0"]], ids=str)
@pytest.mark.parametrize("port", ["", ":input", ":grad_output", ":grad_input"])
def test_modules_that_share_their_hook_dicts_are_each_captured(places, port):
    first = nn.Linear(3, 3)
    model = nn.Sequential(first, copy.copy(first))
    with hl.capture(model, *(place + port for place in places)) as record:
        model(X.clone().requires_grad_() * 1).sum().backward()
    assert record.places() == [f"0{port}", f"1{port}"]
    assert [len(record.calls(place)) for place in record] == [1, 1]
    with hl.capture(model, *(place + port for place in places), keep="last") as last:
        model(X.clone().requires_grad_() * 1).sum().backward()
    assert [torch.equal(last[place], record[place]) for place in record] == [True, True]
    assert_clean(model)


def send_saved(model, pipe):
    """Pickle a model inside a capture, and send it to the other process."""
    for _ in range(5):
        hl.capture(nn.Identity(), "").attach().remove()
    with hl.capture(model, ""):
        model(X)
        pipe.send_bytes(pickle.dumps(model))


def test_a_model_that_a_forked_process_saved_inside_a_capture_can_be_captured():
    # A forked process and its parent give the same numbers to their next hooks.
    model, forking = nn.Linear(3, 3), multiprocessing.get_context("fork")
    ours, theirs = forking.Pipe(duplex=False)
    child = forking.Process(target=send_saved, args=(model, theirs), daemon=True)
    child.start()
    assert ours.poll(60)
    saved = pickle.loads(ours.recv_bytes())
    child.join()
    for _ in range(10):
        with hl.capture(saved, "") as record:
            saved(X)
        assert torch.equal(record[""], model(X))
        assert len(record.calls("")) == 1
    assert_clean(saved)


# -- other processes ------------------------------------------------------------------------------


class OutputsInTheWorker(Dataset):
    """Runs a model in the worker, and tells what the hook dicts are like afterwards."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 4

    def __getitem__(self, index):
        with torch.no_grad():
            out = self.model(X[index])
        modules = list(self.model.modules())
        return out, sum(len(module.__dict__[name]) for module in modules for name in HOOK_DICTS)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_data_loader_are_given_the_model_inside_a_context(start):
    model = small()
    bare = model(X)
    places = ["**", "**:input", "0.weight:grad"]
    with hl.capture(model, *places) as record, hl.hook(model, "1", lambda value: None):
        model(X)
        loader = DataLoader(
            OutputsInTheWorker(model), 2, num_workers=1, multiprocessing_context=start
        )
        rows, left = zip(*loader, strict=True)
    torch.testing.assert_close(torch.cat(rows), bare.detach())
    if start == "spawn":
        assert torch.cat(left).tolist() == [0, 0, 0, 0]
    assert all(len(record.calls(place)) == 1 for place in record.places())
    assert_clean(model)


def test_a_copy_of_a_model_whose_weights_are_preserved_loses_the_hook_at_its_first_call():
    model = nn.Sequential(nn.Linear(2, 2))
    with hl.preserve(model):
        copied = copy.deepcopy(model)
        copied(torch.ones(1, 2))
        assert_clean(copied)
    assert_clean(model)
