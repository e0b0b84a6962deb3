"""Records on disk, against the record that was saved."""

import errno
import json
import os
import sys
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.storage import locks

Pair = namedtuple("Pair", "first second")


@dataclass
class Answer:
    hidden: torch.Tensor
    note: str


class ReturnsMany(nn.Module):
    def forward(self, x):
        parts = [x + 1, {"mask": x > 0, 3: None}]
        return parts, Pair(x, x.half()), Answer(x * 2, "a note"), float("inf"), object()


class LayersAndNested(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.nested = ReturnsMany()
        self.never = nn.ReLU()

    def forward(self, x):
        y = self.fc(x)
        self.nested(y)
        return self.fc(y[:, :3])


@pytest.fixture
def saved_model():
    torch.manual_seed(0)
    return LayersAndNested()


def test_a_record_is_read_again_as_it_was(saved_model, tmp_path):
    with hl.capture(saved_model, "**", "fc:inputs", "fc.weight", detach=True) as record:
        saved_model(torch.randn(2, 3))
    again = hl.load_record(hl.save_record(record, tmp_path))
    assert again.places() == record.places()
    for place in ("fc", "fc:inputs", "fc.weight"):
        for mine, theirs in zip(again.calls(place), record.calls(place), strict=True):
            mine, theirs = (v["input"] if isinstance(v, dict) else v for v in (mine, theirs))
            assert torch.equal(mine, theirs), place
    parts, pair, answer, number, other = again["nested"]
    expected = record["nested"]
    assert torch.equal(parts[0], expected[0][0])
    assert parts[1][3] is None
    assert torch.equal(parts[1]["mask"], expected[0][1]["mask"])
    assert pair["second"].dtype == torch.float16
    assert torch.equal(pair["first"], expected[1].first)
    assert torch.equal(answer["hidden"], expected[2].hidden)
    assert answer["note"] == "a note"
    assert number == float("inf")
    assert other.startswith("<object")
    assert torch.equal(again["nested[2][hidden]"], answer["hidden"])
    assert again.unfired() == record.unfired()
    assert "not called" in again.unfired()["never"]
    assert repr(again).splitlines()[0] == repr(record).splitlines()[0]


def test_calls_and_gradients_stay_in_order(saved_model, tmp_path):
    with hl.capture(saved_model, "fc", "fc:grad_output") as record:
        saved_model(torch.randn(2, 3)).sum().backward()
    again = hl.load_record(hl.save_record(record, tmp_path))
    for n in range(2):
        assert torch.equal(again["fc", n], record["fc", n])
        assert torch.equal(again["fc:grad_output", n], record["fc:grad_output", n])
    assert not again["fc", 0].requires_grad
    with pytest.raises(hl.SeveralCalls):
        again["fc"]
    with pytest.raises(hl.NotCaptured, match="Closest: 'fc'"):
        again["fd"]


def test_a_call_without_a_gradient_is_still_without_one(saved_model, tmp_path):
    with hl.capture(saved_model, "fc:grad_output") as record:
        saved_model(torch.randn(2, 3))
        saved_model(torch.randn(2, 3)).sum().backward()
    assert record.calls("fc:grad_output")[0] is None
    again = hl.load_record(hl.save_record(record, tmp_path))
    assert [v is None for v in again.calls("fc:grad_output")] == [True, True, False, False]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64, torch.uint16,
        torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
    ],
)  # fmt: skip
def test_dtypes_stay_what_they_are(dtype, tmp_path):
    model = nn.Sequential(nn.Identity())
    x = torch.tensor([[1.0, 0.0]]).to(dtype)
    with hl.capture(model, "0") as record:
        model(x)
    again = hl.load_record(hl.save_record(record, tmp_path))["0"]
    assert again.dtype == dtype
    assert again.tolist() == x.tolist()


def test_what_safetensors_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    model = nn.Sequential(nn.Identity())
    with hl.capture(model, "0") as record:
        model(torch.eye(2).to_sparse())
    with pytest.raises(hl.RecordError, match=r"'0'.*sparse.*transform="):
        hl.save_record(record, tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_a_record_is_not_written_where_a_store_or_a_run_is(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))
    data = torch.randn(4, 2).split(2)
    hl.harvest(model, data, "0", to=tmp_path / "store", quiet=True)
    with hl.watch(model, every=1, to=tmp_path / "run") as watching:
        model(data[0]).sum().backward()
        watching.step()
    with hl.capture(model, "0") as record:
        model(data[0])
    for name in ("store", "run"):
        with pytest.raises(hl.RecordError, match=rf"a {name} in it.*another folder"):
            hl.save_record(record, tmp_path / name)
        assert not (tmp_path / name / "record.json").exists()


def test_a_file_where_the_folder_should_be_is_told_of(saved_model, tmp_path):
    with hl.capture(saved_model, "fc") as record:
        saved_model(torch.randn(2, 3))
    (tmp_path / "file").write_text("mine")
    for name in ("file", "file/below"):
        with pytest.raises(hl.HooklineError, match=rf"'.*{name}'.*cannot be made a folder"):
            hl.save_record(record, tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_missing_record_names_what_writes_one(tmp_path):
    with pytest.raises(hl.RecordError, match=r"no file record\.json.*by hookline\.save_record\."):
        hl.load_record(tmp_path)


def test_a_value_that_changed_since_is_refused(saved_model, tmp_path):
    with hl.capture(saved_model, "fc") as record:
        saved_model(torch.randn(2, 3))
    with torch.no_grad():
        record["fc", 0].zero_()
    with pytest.raises(hl.ValueChanged):
        hl.save_record(record, tmp_path / "r")


def _mutations():
    tensor = {"tensor": "0"}
    yield "no list", {"places": 3}
    yield "no object", {"places": [3]}
    yield "no path", {"places": [{"port": "output", "calls": []}]}
    yield "no port", {"places": [{"path": "0", "port": "__class__", "calls": []}]}
    yield "a port that is a list", {"places": [{"path": "0", "port": [], "calls": []}]}
    yield "bad part", {"places": [{"path": "0", "port": "output", "parts": [[]], "calls": []}]}
    yield "unknown tensor", {"places": [{"path": "0", "port": "output", "calls": [{"tensor": 9}]}]}
    yield "two keys", {"places": [{"path": "0", "port": "output", "calls": [{**tensor, "x": 1}]}]}
    yield "no pair", {"places": [{"path": "0", "port": "output", "calls": [{"dict": [[1]]}]}]}
    yield "bad key", {"places": [{"path": "0", "port": "output", "calls": [{"dict": [[[], 1]]}]}]}
    yield "bad float", {"places": [{"path": "0", "port": "output", "calls": [{"float": "1e9"}]}]}


MUTATIONS = list(_mutations())


@pytest.mark.parametrize("content", [c for _, c in MUTATIONS], ids=[n for n, _ in MUTATIONS])
def test_a_file_that_is_no_record_is_refused(content, tmp_path):
    model = nn.Sequential(nn.Identity())
    with hl.capture(model, "0") as record:
        model(torch.ones(1))
    hl.save_record(record, tmp_path)
    path = tmp_path / "record.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written | {"unfired": []} | content))
    with pytest.raises(hl.RecordError, match="not as a record is written"):
        hl.load_record(tmp_path)


@pytest.mark.parametrize("limit", [1000, 100_000])
def test_deep_nesting_is_refused_whatever_the_limit_of_recursion(tmp_path, limit):
    model = nn.Sequential(nn.Identity())
    with hl.capture(model, "0") as record:
        model(torch.ones(1))
    hl.save_record(record, tmp_path)
    path = tmp_path / "record.json"
    written = json.loads(path.read_text())
    deep = '{"list": [' * 900 + "]}" * 900
    written["places"][0]["calls"] = ["HERE"]
    path.write_text(json.dumps(written).replace('"HERE"', deep))
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        with pytest.raises(hl.RecordError):
            hl.load_record(tmp_path)
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.parametrize(
    ("limit", "found"),
    [(1000, "nested too deeply|nested more than"), (20_000, "nested more than 1000 levels")],
)
def test_what_is_nested_too_deeply_to_be_read_is_not_written(tmp_path, limit, found):
    class Nesting(nn.Module):
        def forward(self, x):
            for _ in range(600):
                x = [x]
            return x

    model = nn.Sequential(Nesting())
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        with hl.capture(model, "0") as record:
            model(torch.ones(1))
        with pytest.raises(hl.HooklineError, match=found):
            hl.save_record(record, tmp_path / "deep")
    finally:
        sys.setrecursionlimit(before)
    assert not (tmp_path / "deep").exists()


def test_a_folder_without_a_record_is_refused(tmp_path):
    with pytest.raises(hl.RecordError, match=r"There is no file record\.json"):
        hl.load_record(tmp_path)


def test_a_call_without_the_part_that_was_asked_for_is_still_without_it(tmp_path):
    class Varied(nn.Module):
        def forward(self, x, whole):
            return x if whole else (x, None)

    model, x = Varied(), torch.ones(2)
    with hl.capture(model, "[0]", "[1]") as record:
        for whole in (True, False, True, False):
            model(x, whole)
    read = hl.load_record(hl.save_record(record, tmp_path))
    assert repr(read) == repr(record)
    assert [value is None for value in read.calls("[0]")] == [True, False, True, False]
    assert read["[1]", 1] is None
    for place in ("[0]", "[1]"):
        with pytest.raises(hl.NotCaptured, match="asked for: the value is a tensor"):
            read[place, 2]


def test_of_several_that_save_into_one_folder_at_once_one_is_read(tmp_path):
    # Threads wait for each other as processes do.
    model = nn.Sequential(nn.Flatten())
    records: list[hl.Record] = []
    for number in range(4):
        with hl.capture(model, "0") as record:
            model(torch.full((2, 3), float(number)))
        records.append(record)
    hl.save_record(records[0], tmp_path)

    def save_often(record):
        for _ in range(15):
            hl.save_record(record, tmp_path)

    with ThreadPoolExecutor() as pool:
        saving = [pool.submit(save_often, record) for record in records]
        while not all(one.done() for one in saving):
            value = hl.load_record(tmp_path)["0"]
            assert any(torch.equal(value, record["0"]) for record in records)
        for one in saving:
            one.result()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["record.json", "record.safetensors"]


def test_without_locks_those_who_save_at_once_do_not_destroy_what_another_saved(
    tmp_path, monkeypatch
):
    def refuse(file, *, shared=False):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    model = nn.Sequential(nn.Flatten())
    records: list[hl.Record] = []
    for number in range(4):
        with hl.capture(model, "0") as record:
            model(torch.full((2, 3), float(number)))
        records.append(record)
    hl.save_record(records[0], tmp_path)  # with locks: the tensors have their usual name
    monkeypatch.setattr(locks, "try_lock", refuse)

    def save_often(record):
        for _ in range(15):
            hl.save_record(record, tmp_path)

    with ThreadPoolExecutor() as pool:
        saving = [pool.submit(save_often, record) for record in records]
        while not all(one.done() for one in saving):
            value = hl.load_record(tmp_path)["0"]
            assert any(torch.equal(value, record["0"]) for record in records)
        for one in saving:
            one.result()
    names = [path.name for path in tmp_path.iterdir()]
    assert not [name for name in names if name.endswith(".part")]
    monkeypatch.undo()
    hl.save_record(records[0], tmp_path)  # with locks again: what lies about is removed
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[-2:] == ["record.json", "record.safetensors"]
    assert names[:-2] in ([], ["hookline.lock"])


def test_a_folder_that_another_saves_into_for_too_long_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "_PATIENCE", 0.05)
    model = nn.Sequential(nn.Flatten())
    with hl.capture(model, "0") as record:
        model(torch.ones(2, 3))
    hl.save_record(record, tmp_path)
    with locks.held(tmp_path, alone=True):
        with pytest.raises(hl.HooklineError, match="Others have been saving"):
            hl.save_record(record, tmp_path)
        assert torch.equal(hl.load_record(tmp_path)["0"], record["0"])
    hl.save_record(record, tmp_path)


def test_keys_that_have_the_same_text_are_told_apart_when_they_are_read_again(tmp_path):
    class Odd(nn.Module):
        def forward(self, x):
            return {1.5: x, "1.5": x + 1}

    model = nn.Sequential(Odd())
    with hl.capture(model, "0") as record:
        model(torch.ones(2))
    loaded = hl.load_record(hl.save_record(record, tmp_path / "new"))
    assert [*loaded["0"]] == ["1.5 at 0", "1.5"]
    for place in ("0[1.5 at 0]", "0[1.5]"):
        assert torch.equal(loaded[place], record[place])


def test_what_is_no_record_is_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match=r"given a dict.*Give a Record.*Store"):
        hl.save_record({"fc": torch.ones(2)}, tmp_path / "values")
    assert not (tmp_path / "values").exists()


@pytest.mark.parametrize("calls", [None, slice(0, 3)])
def test_a_record_that_lacks_the_gradient_of_a_call_moves_after_it_was_loaded(tmp_path, calls):
    model, x = nn.Linear(2, 2), torch.randn(3, 2)
    with hl.capture(model, ":grad_output", calls=calls) as record:
        with torch.no_grad():
            model(x)
        model(x).sum().backward()
    hl.save_record(record, tmp_path / "record")
    loaded = hl.load_record(tmp_path / "record")
    for one in (record, loaded, record.to("cpu"), loaded.to("cpu"), loaded.to("cpu").to("cpu")):
        nothing, ones = one.calls(":grad_output")
        assert nothing is None
        assert torch.equal(ones, torch.ones(3, 2))
        assert torch.equal(one[":grad_output", 1], ones)
        with pytest.raises(hl.GradientNotAvailable, match="was asked for"):
            one[":grad_output", 0]
        assert one.nbytes == ones.nbytes
    assert loaded.to("meta")[":grad_output", 1].is_meta


def test_a_record_that_lacks_a_part_of_a_call_moves_after_it_was_loaded(tmp_path):
    class Parts(nn.Module):
        def forward(self, x):
            return (x, x + 1) if len(x) == 3 else (x,)

    model, x = Parts(), torch.randn(3, 2)
    with hl.capture(model, "[1]", ":grad_output[1]") as record:
        model(x[:2].requires_grad_())
        model(x.clone().requires_grad_())[1].sum().backward()
    hl.save_record(record, tmp_path / "record")
    loaded = hl.load_record(tmp_path / "record")
    for one in (record, record.to("cpu"), loaded, loaded.to("cpu")):
        assert [value is None for value in one.calls("[1]")] == [True, False]
        assert torch.equal(one["[1]", 1], x + 1)
        assert torch.equal(one[":grad_output[1]", 1], torch.ones(3, 2))
        for place in ("[1]", ":grad_output[1]"):
            with pytest.raises(hl.HooklineError, match=r"has \[0\]|call 0"):
                one[place, 0]
