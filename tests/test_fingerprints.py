"""Fingerprints tell whether model, data and functions of a harvest are the same as before."""

import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch
from environment import ROOT
from harvests import (
    Stopped,
    assert_rows,
    failing_after,
)
from models import overwriting_mlp
from oracles import rows_by_hand
from torch import nn

import hookline as hl
from hookline.harvests.fingerprints import digest, fingerprint, stable_text


def test_a_function_with_a_set_of_words_is_the_same_in_every_process():
    code = (
        "from hookline.harvests.fingerprints import stable_text\n"
        "use = lambda m, b: m(**{k: b[k] for k in b if k in {'ids', 'mask', 'types'}})\n"
        "print(stable_text(use))"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in "012"
    }  # fmt: skip
    assert len(told) == 1
    assert stable_text(lambda k: k in {"a", "b"}) != stable_text(lambda k: k in {"a", "c"})


def test_a_fingerprint_sees_every_change():
    model = nn.Sequential(nn.Linear(100, 200), nn.BatchNorm1d(200))
    seen = {fingerprint(model)}
    assert seen == {fingerprint(model)}
    for change in (
        lambda: model[0].weight.data[77, 33].add_(1e-3),
        lambda: model[1].running_mean.add_(1),
        lambda: model.append(nn.ReLU()),
        lambda: model.double(),
    ):
        change()
        seen.add(fingerprint(model))
    assert len(seen) == 5


@pytest.mark.parametrize("size", [1, 3, 7, 8, 100, 40_000, 40_001])
def test_a_fingerprint_is_of_what_stands_in_a_tensor_wherever_it_stands(size):
    whole = torch.randn(size + 9).half()
    model = nn.Module()
    model.register_buffer("a", whole[:size].clone())
    first = fingerprint(model)
    for start in range(9):
        whole[start : start + size] = model.a
        other = nn.Module()
        other.register_buffer("a", whole[start : start + size])
        assert fingerprint(other) == first
    for place in {0, size // 2, size - 1}:
        with torch.no_grad():
            other.a.copy_(model.a)
            other.a[place] = 9.0
        assert fingerprint(other) != first


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_")
def test_a_fingerprint_sees_weights_that_are_packed():
    def quantized(seed):
        return torch.ao.quantization.quantize_dynamic(overwriting_mlp(seed), {nn.Linear})

    assert fingerprint(quantized(0)) == fingerprint(quantized(0)) != fingerprint(quantized(1))


@pytest.mark.filterwarnings("ignore:torch.quantize_")
def test_quantized_values_are_told_apart_by_scale_and_order():
    x = torch.tensor([1.0, 2.0, 3.0])
    made = [
        torch.quantize_per_tensor(one, scale, 0, torch.qint8)
        for one, scale in ((x, 0.1), (x * 2, 0.2), (x.flip(0), 0.1))
    ]
    assert len({*map(digest, made)}) == 3


def test_modules_that_have_no_shapes_yet_have_a_fingerprint():
    assert fingerprint(nn.LazyLinear(3)) == fingerprint(nn.LazyLinear(4))


def test_a_model_whose_weights_would_be_drawn_at_each_start_is_refused(data, to):
    for layer in (nn.LazyLinear(3), nn.LazyBatchNorm1d(affine=False)):
        model = nn.Sequential(nn.ReLU(), layer)
        with pytest.raises(hl.HarvestError, match=r"'1\.(weight|running_mean)' has no shape yet"):
            hl.harvest(model, data, "0", to=to, quiet=True)
    assert not to.exists()


def test_a_model_that_is_spread_over_ranks_is_refused(data, to):
    model = overwriting_mlp()
    model[2].weight.placements = ()  # as a DTensor has
    with pytest.raises(hl.HarvestError, match=r"'2\.weight' is spread over ranks"):
        hl.harvest(model, data, "0", to=to, quiet=True)


def test_functions_and_slices_are_told_apart():
    a, b = (lambda v: v[:, 0]), (lambda v: v[:, 1])
    things = [
        None, a, b, torch.relu, torch.tanh, np.s_[:, 0], np.s_[:, 1], np.s_[..., :3],
        hl.heads(1, of=4), hl.heads(2, of=4), hl.last_token(torch.ones(2, 3)),
        hl.last_token(torch.ones(2, 4)), hl.last_token,
    ]  # fmt: skip
    assert len({stable_text(one) for one in things}) == len(things)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_batches_are_told_apart():
    class Own:
        def __init__(self, x):
            self.own, self.me = x, self

    x = torch.arange(6.0)
    things = [
        x, x.flip(0), x.double(), x.view(2, 3), {"x": x}, {"y": x}, [x], x.numpy() + 1,
        {"x": x, "n": 1}, "a", ["a", "b"], ["b", "a"], Own(x), Own(x + 1), np.array(["a"]),
        np.int32(5), np.int32(6), np.float32(0.5), 1j, 2j, np.complex64(3j),
        *odd_batches(x), *odd_batches(x + 1),
    ]  # fmt: skip
    assert len({digest(one) for one in things}) == len(things)
    assert [*map(digest, odd_batches(x))] == [*map(digest, odd_batches(x))]


class Held:
    """What a batch of another library may be: arrays somewhere in its attributes."""

    def __init__(self, inside):
        self.inside, self.me = inside, self


def many_held(inside):
    """Objects each of which leads to all others."""
    others = [Held(None) for _ in range(20)]
    for one in others:
        one.inside = others
    return [others, inside]


class Picture:
    """Known to numpy only, as an image of Pillow is."""

    def __init__(self, array):
        self.__array_interface__ = array.__array_interface__
        self.kept = (array,)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: [Path(f"{n}.png")],
        lambda n: Picture(np.full((2, 2), n)),
        lambda n: Held(Held({"x": [torch.full((3,), n)]})),
        lambda n: Held(many_held(torch.full((3,), n))),
        lambda n: {"days": [date(2020, 1, n)]},
        lambda n: bytearray([n]),
        lambda n: {str(n), "a", "b", "c"},
        lambda n: range(n),
    ],
    ids=["path", "picture", "held", "many", "date", "bytes", "set", "range"],
)
def test_batches_of_objects_are_told_apart(make, data, to):
    assert digest(make(1)) == digest(make(1)) != digest(make(2))
    batches = [{"input": x, "own": make(n + 1)} for n, x in enumerate(data)]
    given = {"forward": lambda model, batch: model(batch["input"]), "to": to, "quiet": True}
    with pytest.raises(Stopped):
        hl.harvest(overwriting_mlp(), failing_after(batches, 3), "0", **given)
    batches[2]["own"] = make(20)
    with pytest.raises(hl.HarvestError, match="Batch 2, the last one that was stored, differs"):
        hl.harvest(overwriting_mlp(), batches, "0", **given)


def odd_batches(x):
    """What torch cannot view as bytes, or numpy has and torch does not."""
    nested = [
        torch.nested.as_nested_tensor([x[:2].clone(), x.clone()], layout=layout)
        for layout in (torch.strided, torch.jagged)
    ]
    return [
        torch.complex(x, x).conj(), x.view(2, 3).to_sparse(), x.numpy().astype(">f4"),
        x.numpy().astype(np.longdouble), nested[0], [nested[1]],
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_batches_of_any_kind_are_gone_on_with(data, to):
    for number, odd in enumerate(odd_batches(torch.arange(6.0))):
        given = [{"x": x, "odd": odd} for x in data]
        run = {"to": to / str(number), "forward": lambda model, batch: model(batch["x"])}
        with pytest.raises(Stopped):
            hl.harvest(overwriting_mlp(), failing_after(given, 2), "0", quiet=True, **run)
        assert_rows(
            hl.harvest(overwriting_mlp(), given, "0", quiet=True, **run),
            rows_by_hand(overwriting_mlp(), data, "0"),
        )
