"""Folders that were changed by hand or by a stranger: what reads them works, or raises an error of
hookline's that says what was asked, what was found and what to do.

Every position of every JSON file is replaced by values of other kinds and taken out, every file is
cut, replaced and removed, and the tensors get a header that lies, with a digest that fits.
"""

import hashlib
import itertools
import json
import os
import random
import re
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import fault_of
from models import Giving
from torch import nn

import hookline as hl

HUGE = int("9" * 400)
VALUES = (
    None, True, -1, 0, 3, 2**63, HUGE, 0.5, -1e308, float("nan"), "", "0", "a\n\x1b[31m", "\ud800",
    "../../etc/passwd", "a\0b", [], [[]], [1, 2, 3], {}, {"a": 1}, {"tensor": "0"},
    {"tensor": []}, {"tensor": "0", "complex": True}, {"float": []}, {"number": [1]},
    {"slice": 3}, {"tuple": 3}, {"dict": [[[], 1]]}, {"dict": [[{"dict": []}, 1]]},
    {"dtype": "float32"}, {"torch": []}, {"device": "cuda"}, {"list": [{"tensor": "0"}]},
)  # fmt: skip
EACH = 1  # of these values at each position, other ones at the next


def positions(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every position in a JSON value."""
    yield path
    keys = (
        content
        if isinstance(content, dict)
        else range(len(content))
        if isinstance(content, list)
        else ()
    )
    for key in keys:
        yield from positions(content[key], (*path, key))


def with_change_at(content: Any, path: tuple[Any, ...], *new: Any) -> Any:
    """A JSON value with something else at a position, or nothing."""
    if not path:
        return new[0] if new else None
    content = content.copy()
    if len(path) == 1 and not new:
        del content[path[0]]
    else:
        content[path[0]] = with_change_at(content[path[0]], path[1:], *new)
    return content


def json_changes(content: Any) -> Iterator[str]:
    """A JSON value changed at every position, as text."""
    values = itertools.cycle(VALUES)
    for path in positions(content):
        for value in itertools.islice(values, EACH):
            yield json.dumps(with_change_at(content, path, value))
        yield json.dumps(with_change_at(content, path))
    text = json.dumps(content)
    yield text.replace("{", '{"format": 1, ', 1)  # a key that stands there twice
    yield "[" * 100_000
    yield '{"a":' * 900 + "1" + "}" * 900


def file_changes(path: Path) -> Iterator[None]:
    """A file that was cut, overwritten, removed, or is something else; put back in the end."""
    whole, outside = path.read_bytes(), path.parent.parent / "outside"
    chance = random.Random(0)
    for size in (0, 7, len(whole) // 2):
        path.write_bytes(whole[:size])
        yield
    for _ in range(8 if whole else 0):
        at = chance.randrange(len(whole))
        path.write_bytes(whole[:at] + chance.randbytes(1) + whole[at + 1 :])
        yield
    path.write_bytes(b"\xff\xfe" + whole)
    yield
    path.unlink()
    yield
    path.mkdir()
    yield
    path.rmdir()
    os.mkfifo(path)  # which would wait for ever
    yield
    for target in (outside, outside / "nothing", Path("/dev/zero"), path):
        path.unlink()
        path.symlink_to(target)
        outside.write_bytes(b"root:x:0:0")
        yield
    path.unlink()
    path.write_bytes(whole)


def tensor_changes(folder: Path, kind: str) -> Iterator[None]:
    """The tensors with a header that was changed, and a digest in the JSON that fits."""
    path, described = folder / f"{kind}.safetensors", folder / f"{kind}.json"
    whole, text = path.read_bytes(), described.read_text()
    (size,) = struct.unpack("<Q", whole[:8])
    header, content = json.loads(whole[8 : 8 + size]), json.loads(text)
    sizes = [[-1], [2**62, 2**62], [HUGE], ["a"], [], [0], 10**9]
    kinds = ["F64", "F4", "U8", "BOOL", "C64", "X", 3]
    texts = [json.dumps(header).replace(next(iter(header)), "other\\n\\u001b")]
    for name in header:
        texts += [json.dumps(with_change_at(header, (name, "shape"), s)) for s in sizes]
        texts += [json.dumps(with_change_at(header, (name, "dtype"), k)) for k in kinds]
        texts += [
            json.dumps(with_change_at(header, (name, "data_offsets"), [0, n])) for n in (1, HUGE)
        ]
        texts.append(json.dumps(with_change_at(header, (name,))))
    written = [struct.pack("<Q", len(t)) + t.encode() + whole[8 + size :] for t in texts]
    written += [struct.pack("<Q", n) + whole[8:] for n in (0, 2**40, 2**64 - 1)]
    for data in written:
        path.write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        described.write_text(json.dumps(content | {"tensors": digest}))
        yield
    path.write_bytes(whole)
    described.write_text(text)


def changes(folder: Path) -> Iterator[None]:
    """A folder of hookline's with one thing changed at a time; as it was in the end."""
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        if path.suffix in (".json", ".jsonl"):
            first, *others = whole.decode().splitlines() if path.suffix == ".jsonl" else [whole]
            for text in json_changes(json.loads(first)):
                path.write_text("\n".join([text, *others]) + "\n")
                yield
            path.write_bytes(whole)
        yield from file_changes(path)
    for path in folder.glob("[a-z]*.safetensors"):
        if (folder / f"{path.stem}.json").is_file():
            yield from tensor_changes(folder, path.stem)


def assert_withstands(read: Callable[[Path], Any], folder: Path) -> None:
    """Reading a folder raises only hookline's errors, in three parts, whatever is changed in it."""
    read(folder)
    errors = []
    for _ in changes(folder):
        try:
            read(folder)
        except hl.HooklineError as error:
            errors.append(error)
    assert len(errors) > 50
    assert all(error.asked and error.found and error.remedy for error in errors)
    assert not any("\x1b" in str(error) for error in errors)
    read(folder)  # all was put back


# -- guard dumps ----------------------------------------------------------------------------------


def logs() -> nn.Module:
    return nn.Sequential(nn.ReLU(), Giving(torch.log))


def huge() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    nn.init.constant_(model[0].weight, 3e38)
    return model


class Root(nn.Module):
    """Its gradient is bad, and its argument has a name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 0).sqrt()


def rooted() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), Root())


def dump_of(model: nn.Module, folder: Path, **options: bool) -> Path:
    """What a guard writes of a step that fails: in its forward, its backward, or its checks."""
    x = torch.full((2, 2), 2.0 if any(options.values()) else -1.0)
    return fault_of(model, x, to=folder, **options).folder


DUMPS = {
    "operation": (logs, False, False),
    "module": (huge, False, True),
    "backward": (rooted, True, False),
}


@pytest.mark.parametrize("given", [False, True], ids=["alone", "with the model"])
@pytest.mark.parametrize("kind", DUMPS)
def test_a_dump_that_was_changed_anywhere_is_replayed_or_refused(kind, given, tmp_path):
    make, backward, careful = DUMPS[kind]
    model = make()
    folder = dump_of(model, tmp_path, backward=backward, careful=careful)
    before = torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    assert_withstands(lambda folder: repr(hl.replay(folder, model if given else None)), folder)
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model.modules()] == modes


SIZES = {
    "in_features": [-1, 0, 10**6, 2**62, HUGE, 2.5, "2"],
    "out_features": [-1, 0, 10**6, 2**62, HUGE, 2.5, "2"],
    "bias": [False, {"tensor": "0"}, {"dict": []}],
    "more": [1],
}


@pytest.mark.parametrize("name", SIZES)
def test_a_module_of_another_size_than_its_state_is_never_made(name, tmp_path):
    folder = dump_of(huge()[:1], tmp_path, careful=True)
    path = folder / "guard.json"
    content = json.loads(path.read_text())
    for size in SIZES[name]:
        options = content["module"]["constructor"] | {name: size}
        path.write_text(json.dumps(with_change_at(content, ("module", "constructor"), options)))
        with pytest.raises(hl.ReplayError, match="cannot be made of what was written"):
            hl.replay(folder)


def test_a_module_of_more_layers_than_its_state_is_never_made(tmp_path):
    model = nn.Sequential(nn.LSTM(2, 2))
    nn.init.constant_(model[0].weight_ih_l0, float("nan"))
    model[0].weight_ih_l0.requires_grad_(False)
    with pytest.raises(hl.NonFiniteError) as caught:
        with hl.guard(model, to=tmp_path, careful=True, ignore="0.weight_ih_l0"):
            model(torch.ones(2, 2))
    folder = caught.value.fault.folder
    path = folder / "guard.json"
    content = json.loads(path.read_text())
    path.write_text(
        json.dumps(with_change_at(content, ("module", "constructor", "num_layers"), 10**12))
    )
    with pytest.raises(hl.ReplayError, match="num_layers"):
        hl.replay(folder)


def test_what_a_model_raises_in_a_replay_is_the_cause_of_the_error(tmp_path):
    model = logs()
    folder = dump_of(model, tmp_path)
    model[1].function = lambda x: 1 // 0
    with pytest.raises(hl.ReplayError, match="raised ZeroDivisionError") as caught:
        hl.replay(folder, model)
    assert type(caught.value.__cause__) is ZeroDivisionError


def test_a_replay_without_a_model_draws_no_random_numbers(tmp_path):
    folder = dump_of(huge(), tmp_path, careful=True)
    before = torch.get_rng_state()
    assert hl.replay(folder).reproduced
    assert torch.equal(torch.get_rng_state(), before)


def test_names_in_a_dump_do_not_steer_a_terminal(tmp_path):
    folder = dump_of(rooted(), tmp_path, backward=True)
    path = folder / "guard.json"
    content = json.loads(path.read_text().replace('"x"', '"\\u001b[31mx"'))
    path.write_text(json.dumps(with_change_at(content, ("module", "positional"), 0)))
    model = rooted()
    model[1].forward = lambda **inputs: (inputs["\x1b[31mx"] * 0).sqrt()
    found = hl.replay(folder, model)
    assert found.reproduced
    assert r"gradient of \x1b[31mx" in repr(found)


# -- all else that is read from folders -----------------------------------------------------------


def saved_record(folder: Path) -> Path:
    model = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))
    with hl.capture(model, "*", "1:grad_output", "0.weight:grad") as record:
        model(torch.ones(2, 2))[0].sum().backward()
    return hl.save_record(record, folder)


def read_record(folder: Path) -> None:
    record = hl.load_record(folder)
    repr(record)
    record._repr_html_()
    for place in record.places():
        assert place in record
        record.calls(place)
        repr(record.nbytes)
    hl.report(folder, folder.parent / "page.html")


def saved_recipe(folder: Path) -> Path:
    first = hl.Recipe([("0", hl.add(torch.ones(2)))], at=(slice(1, None), hl.heads(0, of=2)))
    second = hl.Recipe([(nn.Linear, hl.noise(0.1) | hl.scale(2j))], calls=[0, 1])
    third = hl.Recipe([(re.compile("a"), torch.relu)], at=hl.last_token(torch.ones(1, 2)))
    return (first + second + third).save(folder)


def read_recipe(folder: Path) -> None:
    for allowed in (False, True):
        try:
            recipe = hl.Recipe.load(folder, allow_functions=allowed)
        except hl.RecipeError:
            if allowed:
                raise
        else:
            repr(recipe)
            recipe._repr_html_()


def saved_measurements(folder: Path) -> Path:
    statistics = [hl.Mean(), hl.Covariance(), hl.Histogram(), hl.TopK(k=2), hl.Norm()]
    data = [torch.randn(3, 2)]
    found = hl.measure(
        nn.Sequential(nn.ReLU()), "0", statistics=statistics, data=data, ids=lambda b: range(3)
    )
    return found.save(folder)


def read_measurements(folder: Path) -> None:
    found = hl.Measurements.load(folder)
    repr(found)
    found._repr_html_()
    for named in found.statistics.values():
        for one in named.values():
            repr(one.result)


def saved_store(folder: Path) -> Path:
    with hl.Store.create(folder, metadata={"a": [1]}) as writer:
        texts = [torch.ones(1, 2), torch.ones(2, 2)]
        writer.append({"fc": torch.ones(2, 2), "text": texts}, ids=["a", "b"])
    return folder


def read_store(folder: Path) -> None:
    store = hl.Store.open(folder)
    repr(store)
    for place in store.places():
        repr(store[place][0])
        repr(store[place][:])
    hl.report(folder, folder.parent / "page.html")


def saved_run(folder: Path) -> Path:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds = ("weight", "update")
    with hl.watch(model, every=1, to=folder, optimizer=optimizer, kinds=kinds) as watching:
        for step in range(3):
            model(torch.ones(1, 2)).sum().backward()
            watching.log(loss=step)
            if step == 1:
                with torch.no_grad():
                    model[0].weight.fill_(float("nan"))
            optimizer.step()
    return folder


def read_run(folder: Path) -> None:
    run = hl.Run(folder)
    repr(run)
    run._repr_html_()
    repr(run.findings())
    for name in run.names():
        run.scalars(name)
    hl.report(folder, folder.parent / "page.html")


FOLDERS = {
    "record": (saved_record, read_record),
    "recipe": (saved_recipe, read_recipe),
    "measurements": (saved_measurements, read_measurements),
    "store": (saved_store, read_store),
    "run": (saved_run, read_run),
}


@pytest.mark.filterwarnings("ignore:RNN module weights", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_that_was_changed_anywhere_is_read_or_refused(kind, tmp_path):
    save, read = FOLDERS[kind]
    folder = save(tmp_path / "folder")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_withstands(read, folder)


@pytest.mark.parametrize("started", [-1, 1e18, HUGE, float("nan"), float("inf")])
def test_a_run_that_began_at_no_time_is_refused(started, tmp_path):
    folder = saved_run(tmp_path / "run")
    (path,) = folder.glob("*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"started": started}))
    with pytest.raises(hl.RunError, match="no time"):
        hl.Run(folder)
