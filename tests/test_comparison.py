"""compare: differences are worked out by hand, with plain hooks and numpy."""

import copy
import gc
import json
import subprocess
import sys
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from models import Giving
from oracles import assert_clean, assert_same_state, state_bits
from torch import nn

import hookline as hl


def stack(*widths):
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
    return nn.Sequential(*layers)


def outputs(model, x):
    """Every module's output by plain hooks, in the order in which calls end."""
    found = {}
    handles = [
        module.register_forward_hook(lambda m, i, o, name=name: found.__setitem__(name, o.detach()))
        for name, module in model.named_modules()
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return found


def test_errors_are_those_of_plain_hooks_in_the_order_of_the_calls():
    a, b, x = stack(4, 6, 5, 3), stack(4, 6, 5, 3), torch.randn(7, 4)
    comparison = hl.compare(a, b, x)
    first, second = outputs(a, x), outputs(b, x)
    assert [row.place for row in comparison] == list(first)
    for row in comparison:
        u, v = (t[row.place].double().numpy().ravel() for t in (first, second))
        assert row.error == pytest.approx(np.abs(u - v).max())
        assert row.relative == pytest.approx(np.linalg.norm(u - v) / np.linalg.norm(u))
        assert row.cosine == pytest.approx(u @ v / np.linalg.norm(u) / np.linalg.norm(v))
        assert (row.shape, row.dtype, row.calls) == (
            str(tuple(first[row.place].shape)),
            "float32",
            1,
        )


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_first_place_is_the_one_that_was_changed(layer):
    a = stack(4, 6, 5, 3)
    b = copy.deepcopy(a)
    assert hl.compare(a, b, torch.randn(7, 4)).equal
    with torch.no_grad():
        b[layer][0].weight.mul_(1.01)
    comparison = hl.compare(a, b, torch.randn(7, 4))
    assert not comparison.equal
    assert not comparison
    assert comparison.first.place == f"{layer}.0"
    assert comparison.first.diverges
    assert f"they part at '{layer}.0': relative error 0.0" in str(comparison)
    assert comparison["0.0"].error == 0 or layer == 0


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-4), (torch.bfloat16, 0.05), (torch.float16, 0.01)],
)
def test_the_tolerance_follows_the_coarser_dtype(dtype, tolerance):
    a = stack(8, 16, 4)
    b = copy.deepcopy(a).to(dtype)
    x = torch.randn(5, 8)
    comparison = hl.compare(a, b, x, batch_b=x.to(dtype))
    assert comparison.equal
    assert {row.tolerance for row in comparison} == {tolerance}
    assert comparison[""].error > 0
    assert "float32, " + str(dtype).removeprefix("torch.") in str(comparison)
    assert not hl.compare(a, b, x, batch_b=x.to(dtype), tolerance=1e-12)
    assert not hl.compare(a, b, x, batch_b=x.to(dtype), tolerance={dtype: 0, torch.float32: 0})


class Rounded(nn.Module):
    """A layer whose values are rounded, between two that are not."""

    def __init__(self, rounding, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(8, 8), Giving(rounding), nn.Linear(8, 8)
        self.factor = factor

    def forward(self, x):
        return self.last(self.middle(self.first(x) * self.factor).dequantize().float())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("rounding", "tolerance"),
    [
        (torch.Tensor.bfloat16, 0.05),
        (torch.Tensor.half, 0.01),
        (lambda x: torch.quantize_per_tensor(x, 0.02, 0, torch.qint8), 0.2),
    ],
)
def test_what_is_computed_from_rounded_values_has_their_tolerance(rounding, tolerance):
    """As float32 under autocast."""
    x = torch.randn(5, 8)
    found = hl.compare(Rounded(torch.Tensor.float), Rounded(rounding), x)
    assert [row.tolerance for row in found] == [1e-4, tolerance, tolerance, tolerance]
    assert found["last"].relative > 1e-4
    assert found.equal
    # Rounded alike, nothing was lost between them.
    alike = hl.compare(Rounded(rounding), Rounded(rounding), x)
    assert [row.tolerance for row in alike] == [1e-4, tolerance, 1e-4, 1e-4]
    strict = hl.compare(Rounded(torch.Tensor.float), Rounded(rounding), x, tolerance={})
    assert strict.first.place == "last"
    wrong = hl.compare(Rounded(torch.Tensor.float), Rounded(rounding, 1.5), x)
    assert wrong.first.place == "middle"


def test_parameters_have_the_tolerance_of_their_own_dtype():
    a, b = Rounded(torch.Tensor.float), Rounded(torch.Tensor.half)
    with torch.no_grad():
        b.last.weight.mul_(1.001)
    found = hl.compare(a, b, torch.randn(5, 8), ("middle", "last.weight"))
    assert found["last.weight"].tolerance == 1e-4
    assert found.first.place == "last.weight"


def test_whole_numbers_are_to_be_equal():
    class Index(nn.Module):
        def __init__(self, step):
            super().__init__()
            self.step = step

        def forward(self, x):
            return x + self.step

    ids = torch.tensor([1000, 2000])
    assert hl.compare(Index(0), Index(0), ids)
    found = hl.compare(Index(0), Index(1), ids)
    assert found.first.error == 1
    assert found.first.tolerance == 0
    large = torch.tensor([2**53, 2**62, -(2**62)])  # float64 has no number for the next one
    assert hl.compare(Index(0), Index(0), large)
    assert hl.compare(Index(0), Index(1), large).first.error == 1


class Old(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head, self.old = stack(4, 4), nn.Linear(4, 2), nn.Identity()

    def forward(self, x):
        return self.old(self.head(self.encoder(x)))


class New(nn.Module):
    def __init__(self, old):
        super().__init__()
        self.enc, self.out, self.new = old.encoder, old.head, nn.Identity()

    def forward(self, x):
        return self.out(self.enc(self.new(x)))


@pytest.mark.parametrize(
    "mapping",
    [
        {"encoder": "enc", "head": "out"},
        lambda path: path.replace("encoder", "enc").replace("head", "out"),
    ],
    ids=["a dict", "a function"],
)
def test_names_are_mapped_and_what_one_model_lacks_is_listed(mapping):
    old = Old()
    comparison = hl.compare(old, New(old), torch.randn(3, 4), mapping=mapping)
    assert comparison.equal
    pairs = {row.place: row.place_b for row in comparison}
    assert pairs["encoder.0.1"] == "enc.0.1"
    assert pairs["head"] == "out"
    assert pairs[""] == ""
    assert comparison.only_a == ["old"]
    assert comparison.only_b == ["new"]
    assert "only in the first model: old" in str(comparison)
    assert comparison["out"] is comparison["head"]


def test_a_mapping_can_leave_places_out_and_move_to_the_root():
    inner = stack(4, 4)
    outer = nn.Sequential()
    outer.add_module("core", inner)
    x = torch.randn(3, 4)
    comparison = hl.compare(outer, inner, x, where="core.**", mapping={"core": ""})
    assert {row.place: row.place_b for row in comparison}["core.0.0"] == "0.0"
    longest = hl.compare(outer, inner, x, where="core.**", mapping={"core.0": "0", "core": "0.0"})
    assert longest["core.0.1"].place_b == "0.1"
    left = hl.compare(inner, inner, x, mapping=lambda p: None if p.endswith("1") else p)
    assert "0.1" not in [row.place for row in left]


def test_a_mapping_of_what_is_not_there_and_a_tolerance_of_no_dtype_are_errors():
    old, x = Old(), torch.randn(3, 4)
    with pytest.raises(hl.PlaceNotFound, match=r"mapped to 'encc'.*second model .* 'encc'"):
        hl.compare(old, New(old), x, mapping={"encoder": "encc"})
    with pytest.raises(hl.PlaceNotFound, match=r"'encodr' was mapped to 'enc'.*first model"):
        hl.compare(old, New(old), x, mapping={"encodr": "enc", "head": "out"})
    for given in ("encoder.0.0", "encoder.0.0.weight", ""):  # all of these are there
        assert hl.compare(old, old, x, where="head", mapping={given: given})
    with pytest.raises(hl.BatchError, match=r"'float32'.*torch\.float32"):
        hl.compare(old, old, x, tolerance={"float32": 1e-3})


@pytest.mark.parametrize("first", [True, False])
def test_a_wrapper_around_the_whole_model_is_left_out_of_names(first):
    model = stack(4, 6, 3)
    models = (nn.DataParallel(model), model) if first else (model, nn.DataParallel(model))
    found = hl.compare(*models, torch.randn(2, 4))
    assert len(found) == 7
    assert found.equal
    assert found["1.0"].calls == found["module.1.0"].calls == 1
    assert not found.only_a
    assert not found.only_b


def test_the_empty_path_is_a_beginning_of_all():
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.core = inner

        def forward(self, x):
            return -self.core(x)

    inner = stack(4, 6, 3)
    found = hl.compare(inner, Outer(inner), torch.randn(2, 4), mapping={"": "core"})
    assert found.equal
    assert [row.place_b for row in found][-2:] == ["core.1", "core"]
    assert found.only_b == ["''"]


def test_a_tolerance_is_any_number_that_is_not_negative():
    model, x = stack(4, 3), torch.randn(2, 4)
    for tolerance in (np.float32(0.5), torch.tensor(0.5), 0.5, {torch.float32: np.float64(0.5)}):
        assert hl.compare(model, model, x, tolerance=tolerance)["0"].tolerance == 0.5
    for tolerance in (-1, float("nan"), {torch.float32: -1.0}):
        with pytest.raises(ValueError, match="A relative error is 0 or more"):
            hl.compare(model, model, x, tolerance=tolerance)


def test_models_without_a_common_place_are_an_error():
    old = Old()
    with pytest.raises(hl.PlaceNotFound, match=r"the second has none.*mapping="):
        hl.compare(old, New(old), torch.randn(3, 4), where="encoder")
    with pytest.raises(hl.PlaceNotFound):
        hl.compare(old, old, torch.randn(3, 4), where="nothing")
    with pytest.raises(hl.PlaceError, match="Only forwards are run"):
        hl.compare(old, old, torch.randn(3, 4), where="head:grad_output")
    with pytest.raises(hl.BatchError, match="At none of them both have a value"):
        hl.compare(old, old, lambda model: None)


class TanhLoop(nn.Module):
    def __init__(self, steps, bad=None):
        super().__init__()
        self.cell, self.steps, self.bad = nn.Tanh(), steps, bad

    def forward(self, x):
        for n in range(self.steps):
            x = self.cell(x + (n == self.bad))
        return x


def test_several_calls_are_compared_one_by_one():
    x = torch.randn(3)
    row = hl.compare(TanhLoop(4), TanhLoop(4, bad=2), x)["cell"]
    assert row.calls == 4
    assert row.call in (2, 3)  # where it is largest; before, nothing differs
    assert row.diverges
    assert hl.compare(TanhLoop(4), TanhLoop(4), x)["cell"].calls == 4
    more = hl.compare(TanhLoop(2), TanhLoop(4), x, where="cell")
    assert more["cell"].calls == 2
    assert more.notes == ["'cell' was called 2 times more in the second model"]
    fewer = hl.compare(TanhLoop(4), TanhLoop(2), x, where="cell")
    assert fewer.notes == ["'cell' was called 2 times more in the first model"]


class NormedLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        for _ in range(3):
            x = self.norm(self.cell(x))
        return x


def test_a_module_that_diverges_in_a_later_call_comes_after_what_made_it_diverge():
    a = NormedLoop()
    b = copy.deepcopy(a)
    b.norm.eps = 0.1
    comparison = hl.compare(a, b, torch.randn(4, 8))
    assert comparison.first.place == "norm"
    assert [row.place for row in comparison] == ["norm", "cell", ""]
    assert comparison["cell"].diverges
    assert [row.calls for row in comparison] == [3, 3, 1]
    x = torch.randn(4, 8)
    rounded = hl.compare(a, copy.deepcopy(a).double(), x, batch_b=x.double())
    assert rounded.equal
    assert [row.place for row in rounded] == ["cell", "norm", ""]


def test_a_call_that_diverges_is_not_hidden_by_a_larger_error_that_is_allowed():
    class Casts(nn.Module):
        def __init__(self, error):
            super().__init__()
            self.cell, self.error = nn.Identity(), error

        def forward(self, x):
            self.cell(x * (1 + self.error))
            return self.cell((x * (1 + 4 * self.error)).bfloat16())

    row = hl.compare(Casts(0), Casts(0.01), torch.ones(3), where="cell")["cell"]
    assert row.diverges
    assert (row.call, row.calls, row.dtype) == (0, 2, "float32")


def test_modules_that_the_second_model_ties_are_compared_call_by_call():
    shared = nn.Linear(8, 8)
    tied = nn.Sequential(shared, nn.ReLU(), shared)
    free = nn.Sequential(copy.deepcopy(shared), nn.ReLU(), copy.deepcopy(shared))
    x = torch.randn(4, 8)
    same = hl.compare(free, tied, x)
    assert same.equal
    assert [(row.place, row.place_b) for row in same] == [
        ("0", "0"),
        ("1", "1"),
        ("2", "0"),
        ("", ""),
    ]
    assert not same.notes
    assert not same.only_a
    with torch.no_grad():
        free[2].bias.add_(1)
    assert hl.compare(free, tied, x).first.place == "2"


def test_several_places_can_be_mapped_onto_one():
    a = nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)])
    b = nn.Sequential(a[0])
    x = torch.randn(2, 3)
    once = hl.compare(a, b, x, where="*", mapping={"0": "0", "2": "0"})
    assert once.equal
    assert once["0"].error == 0
    assert once.only_a == ["1", "2"]  # the second model calls it once
    twice = hl.compare(a, b, lambda m: (m(x), m(x)), where="*", mapping={"1": "0", "0": "0"})
    assert [(row.place, row.calls) for row in twice] == [("0", 1), ("1", 1)]
    assert twice.notes == [
        "'0' was called 1 time more in the first model",
        "'1' was called 1 time more in the first model",
    ]


def test_modules_that_only_one_model_calls_are_listed():
    class Skips(nn.Module):
        def __init__(self, skip):
            super().__init__()
            self.a, self.b, self.skip = nn.Tanh(), nn.Identity(), skip

        def forward(self, x):
            return self.a(x) if self.skip else self.b(self.a(x))

    x = torch.randn(3)
    assert hl.compare(Skips(False), Skips(True), x).only_a == ["b"]
    assert hl.compare(Skips(True), Skips(False), x).only_b == ["b"]


def test_nested_values_are_compared_part_by_part():
    a = Giving(lambda x: {"h": (x, x * 2), "n": None})
    b = Giving(lambda x: {"h": (x, x * 3), "extra": x})
    comparison = hl.compare(a, b, torch.ones(2))
    assert comparison["[h][0]"].error == 0
    assert comparison["[h][1]"].relative == 0.5
    assert comparison.first.place == "[h][1]"
    assert comparison.only_b == ["[extra]"]


def test_parts_that_one_model_alone_returns_are_listed_and_diverge_from_nothing():
    more = nn.Sequential(Giving(lambda x: (x, x * 2)), Giving(lambda x: x[0]))
    less = nn.Sequential(Giving(lambda x: (x, None)), Giving(lambda x: x[0]))
    x = torch.ones(2)
    assert hl.compare(more, less, x).equal
    assert hl.compare(more, less, x).only_a == ["0[1]"]
    assert hl.compare(less, more, x).only_b == ["0[1]"]
    twice = hl.compare(more, less, lambda model: (model(x), model(x)))
    assert twice.only_a == ["0[1]"]
    late = nn.Sequential(less[0], Giving(lambda x: x[0] * 2))
    assert hl.compare(more, late, x).first.place == "1"


def test_values_without_a_common_part_diverge():
    comparison = hl.compare(Giving(lambda x: x), Giving(lambda x: (x, x)), torch.ones(2))
    assert not comparison.equal
    assert comparison.first.remark == "only in the first"
    assert not comparison.only_a


def test_shapes_that_differ_are_named():
    comparison = hl.compare(Giving(lambda x: x), Giving(lambda x: x[:1]), torch.ones(2, 3))
    assert comparison.first.remark == "shapes (2, 3) and (1, 3)"
    assert "they part at '': shapes (2, 3) and (1, 3)" in str(comparison)
    assert comparison.to_dict()["places"][0]["error"] is None


def test_nan_and_infinity_are_equal_only_to_themselves():
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([1.0, nan, inf, -inf])
    assert hl.compare(Giving(lambda x: x), Giving(lambda x: x), x).equal
    found = hl.compare(
        Giving(lambda x: x), Giving(lambda x: torch.tensor([1.0, 2.0, inf, inf])), x
    ).first
    assert found.error == inf
    assert found.diverges
    assert not np.isnan(found.cosine)
    assert (
        found.remark == "NaN in the first and inf in the first and inf in the second, 2 of 4 differ"
    )
    content = hl.compare(Giving(lambda x: x), Giving(lambda x: x * nan), torch.ones(2)).to_dict()
    assert json.loads(json.dumps(content, allow_nan=False)) == content


def test_values_without_a_finite_number_in_common_have_no_cosine():
    one, none = Giving(lambda x: x), Giving(lambda x: x * float("nan"))
    comparison = hl.compare(one, none, torch.ones(2))
    assert np.isnan(comparison[""].cosine)
    assert comparison.to_dict()["places"][0]["cosine"] is None
    assert "1.00000" not in str(comparison)


def test_zeros_and_nothing_have_an_error_too():
    zero, one = Giving(lambda x: x * 0), Giving(lambda x: x)
    assert hl.compare(zero, zero, torch.ones(2)).first is None
    assert hl.compare(zero, zero, torch.ones(2))[""].cosine == 1
    assert hl.compare(zero, one, torch.ones(2)).first.relative == float("inf")


@pytest.mark.parametrize("size", [1e-170, 1e-310, 1e170, 1e300])
def test_values_whose_squares_are_nothing_or_infinite_are_compared(size):
    one, other = Giving(lambda x: x * size), Giving(lambda x: x * (3 * size))
    x = torch.tensor([1.0, -1.0], dtype=torch.float64)
    assert hl.compare(one, one, x)
    found = hl.compare(one, other, x)[""]
    assert found.relative == pytest.approx(2)
    assert found.cosine == pytest.approx(1)
    assert found.error == pytest.approx(2 * size)


@pytest.mark.parametrize(
    "give",
    [
        lambda x: float(x.sum()),
        lambda x: int(x.sum()),
        lambda x: x.numpy(),
        lambda x: x.numpy().sum(),
        lambda x: {"y": x * 0, "loss": x.sum().item()},
    ],
    ids=["float", "int", "array", "numpy number", "beside a tensor"],
)
def test_numbers_and_arrays_are_compared_too(give):
    one, other = Giving(give), Giving(lambda x: give(2 * x))
    assert hl.compare(one, one, torch.ones(3))
    found = hl.compare(one, other, torch.ones(3))
    assert found.first.relative == pytest.approx(1)
    assert found.first.place in ("", "[loss]")
    x = torch.ones(3)
    with torch.device("meta"):  # a default device, as others have cuda there
        assert hl.compare(one, other, x).to_dict() == found.to_dict()


def test_an_array_that_is_written_to_later_is_compared_as_it_was():
    class Reuses(nn.Module):
        def __init__(self, step):
            super().__init__()
            self.first, self.step, self.memory = Giving(self.fill), step, np.zeros(3)

        def fill(self, x):
            self.memory[:] = x.numpy() + self.step
            return self.memory

        def forward(self, x):
            self.first(x)
            self.memory[:] = 0
            return x

    found = hl.compare(Reuses(0), Reuses(1), torch.ones(3))
    assert found.first.place == "first"
    assert found.first.error == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_quantised_model_is_compared_with_the_float_one():
    torch.manual_seed(0)
    model = stack(16, 32, 8).eval()
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    comparison = hl.compare(model, quantised, torch.randn(4, 16))
    assert comparison["0.0"].error > 0
    assert comparison["0.0"].cosine > 0.99
    assert comparison.equal
    assert hl.compare(model, quantised, torch.randn(4, 16), tolerance=1e-4).first.place == "0.0"
    packed = Giving(lambda x: torch.quantize_per_tensor(x, 0.01, 0, torch.qint8))
    row = hl.compare(Giving(lambda x: x), packed, torch.linspace(-1, 1, 7))[""]
    assert 0 < row.error <= 0.0051
    assert row.tolerance == 0.2
    assert row.dtype_b == "qint8"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_sparse_ragged_and_complex_values_are_compared():
    x = torch.eye(3)
    assert hl.compare(Giving(lambda x: x.to_sparse()), Giving(lambda x: x), x).equal
    ragged = Giving(lambda x: torch.nested.nested_tensor([x[0], x[1, :2]]))
    assert hl.compare(ragged, ragged, x).equal
    row = hl.compare(Giving(lambda x: x * 1j), Giving(lambda x: x * 2j), x)[""]
    assert row.relative == 1
    assert row.error == 1


def test_parameters_inputs_and_operations_are_compared_where_asked():
    a = stack(4, 4)
    b = copy.deepcopy(a)
    with torch.no_grad():
        b[0][0].bias.add_(1)
    x = torch.randn(2, 4)
    found = hl.compare(a, b, x, where=["0.0.weight", "0.0.bias", "0.0:input", "0.1:input"])
    assert found["0.0.weight"].error == 0
    assert found["0.0.bias"].error == pytest.approx(1)
    assert found["0.0:input"].error == 0
    assert found["0.1:input"].error == pytest.approx(1)


# -- compiled -------------------------------------------------------------------------------------

COMPILED = """
import torch, warnings
from torch import nn
import hookline as hl
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2)))
other = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2)))
other.load_state_dict(model.state_dict())
seen = []
def backend(graph, inputs):
    seen.append(len(graph.graph.nodes))
    def run(*args):
        return graph.forward(*args)
    return run
compiled = torch.compile(other, backend=backend)
x = torch.randn(3, 4)
found = hl.compare(model, compiled, x)
assert seen, "the compiled model ran"
assert [row.place for row in found if row.place] and found.equal and not found.notes, found
print(sorted(row.place for row in found))
"""


def test_a_compiled_model_that_has_not_run_is_compared_inside():
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(["", "0", "1", "1.0", "1.1"])


COMPILED_CALLS = """
import copy, sys, torch
from torch import nn
import hookline as hl
torch.manual_seed(0)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.cell = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(3):
            x = self.norm(self.cell(x))
        return x


a = Recurrent()
b = copy.deepcopy(a)
if "differ" in sys.argv:
    with torch.no_grad():
        b.cell.bias.add_(1)
if "a" in sys.argv:
    a = torch.compile(a, backend="eager")
else:
    b = torch.compile(b, backend="eager")
found = hl.compare(a, b, torch.randn(3, 4))
first = found.first and found.first.place.removeprefix("_orig_mod.")
print(found.equal, first, len(found), found.only_a, found.only_b, found.notes)
"""


@pytest.mark.parametrize("which", ["a", "b"])
def test_compiled_against_eager_is_told_in_the_order_of_the_calls(which):
    for args, told in [([], "True None 3 [] []"), (["differ"], "False cell 3 [] []")]:
        command = [sys.executable, "-c", COMPILED_CALLS, which, *args]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(told)
        assert "has several calls, the last is compared" in done.stdout


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_of_a_compiled_model_that_has_run_the_output_is_compared():
    gc.collect()  # what was attached to models of other tests lets compiled ones run eagerly
    model, ran = stack(4, 4), []

    def backend(graph, inputs):
        def run(*args):
            ran.append(1)
            return [out * 1.5 for out in graph.forward(*args)]  # a compiler with a bug

        return run

    compiled = torch.compile(copy.deepcopy(model), backend=backend)
    x = torch.randn(3, 4)
    with torch.no_grad():
        compiled(x)
    ran.clear()
    comparison = hl.compare(model, compiled, x)
    assert ran, "the graph ran, not the eager model"
    assert [row.place for row in comparison] == [""]
    assert comparison.first.relative == pytest.approx(0.5)
    assert "something compiled has run in this process" in comparison.notes[0]
    with pytest.raises(hl.BatchError, match=r"something compiled has run.*Name ''"):
        hl.compare(model, compiled, x, where="0")
    inputs = hl.compare(model, compiled, x, where=["**:input", ""])
    assert "only outputs of modules" in inputs.notes[0]
    torch.compiler.reset()
    assert len(hl.compare(model, compiled, x).rows) > 1


# -- all is as before -----------------------------------------------------------------------------


def test_both_run_with_the_same_random_numbers_and_nothing_is_changed():
    class Random(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.norm(x)) + torch.rand(1)

    a, b = Random(), Random()
    b.norm.eval()
    states = state_bits(a), state_bits(b)
    random, x = torch.get_rng_state(), torch.randn(8, 4, generator=torch.Generator())
    assert hl.compare(a, a, x).equal
    assert not hl.compare(a, b, x).equal
    assert hl.compare(a, b, x, mode="eval").equal
    assert torch.equal(random, torch.get_rng_state())
    assert a.norm.training
    assert not b.norm.training
    assert_same_state(a, states[0]), assert_same_state(b, states[1])
    assert_clean(a, b)


def test_a_model_that_writes_into_its_batch_does_not_disturb_the_other():
    x = torch.tensor([-1.0, 2.0])
    assert hl.compare(nn.ReLU(inplace=True), nn.ReLU(inplace=True), x).equal
    assert x.tolist() == [-1, 2]
    in_place = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
    plain = nn.Sequential(nn.Identity(), nn.ReLU())
    assert hl.compare(in_place, plain, x).equal
    assert hl.compare(plain, in_place, x).equal


def test_nothing_is_left_when_a_model_raises():
    a, b = stack(4, 4), stack(3, 3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        hl.compare(a, b, torch.randn(2, 4))
    assert_clean(a, b)
    with torch.device("meta"):
        nowhere = stack(4, 4)
    with pytest.raises((hl.BatchError, RuntimeError), match="meta"):
        hl.compare(nowhere, nowhere, torch.randn(2, 4, device="meta"))
    assert_clean(nowhere)


def test_values_of_the_first_model_are_let_go_as_they_are_compared():
    alive = []

    class Counts(nn.Module):
        def forward(self, x):
            y = x + 1
            alive.append(sum(len(calls) for calls in kept))
            return y

    import hookline.comparisons.comparing as module

    kept = []
    meeting = module._ValueMatcher

    class Spy(meeting):
        def __init__(self, found, *rest):
            super().__init__(found, *rest)
            kept.extend(found.values())

    module._ValueMatcher = Spy
    try:
        model = nn.Sequential(Counts(), Counts(), Counts())
        hl.compare(model, model, torch.ones(2))
    finally:
        module._ValueMatcher = meeting
    assert alive[3:] == [4, 3, 2]  # with the whole model's own


# -- showing --------------------------------------------------------------------------------------


def test_a_comparison_is_shown_and_is_plain_data():
    a, b = stack(4, 6, 3), stack(4, 6, 3)
    comparison = hl.compare(a, b, torch.randn(2, 4))
    content = comparison.to_dict()
    assert json.loads(json.dumps(content)) == content
    assert content["first"] == "0.0"
    assert content["equal"] is False
    assert content["places"][0]["diverges"] is True
    frame = comparison.to_pandas()
    assert list(frame["place"]) == [row.place for row in comparison]
    assert frame["diverges"].any()
    for width in (60, 80, 120):
        assert max(map(len, comparison.show(width=width).splitlines())) <= width
    assert "<table>" in comparison._repr_html_()
    assert "diverges" in comparison._repr_html_()
    with pytest.raises(hl.NotCaptured, match="only_a and only_b"):
        comparison["nowhere"]


def test_of_many_rows_those_around_the_first_divergence_are_shown():
    a = nn.Sequential(*[nn.Linear(2, 2) for _ in range(100)])
    b = copy.deepcopy(a)
    with torch.no_grad():
        b[80].bias.add_(1)
    text = str(hl.compare(a, b, torch.randn(1, 2)))
    assert "they part at '80'" in text
    assert "\n  80 " in text
    assert "\n  30 " not in text
    assert "41 more rows in comparison.rows" in text


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_second_model_that_takes_no_hooks_is_told_as_such():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU())
    with pytest.raises(hl.NotHookable, match="it is a ScriptModule"):
        hl.compare(model, torch.jit.script(model), torch.randn(2, 4))


def test_a_second_model_of_another_dtype_is_told_of_a_batch_of_its_own():
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)
    with pytest.raises(RuntimeError, match="dtype") as caught:
        hl.compare(model, copy.deepcopy(model).bfloat16(), x)
    assert any("batch_b=x.bfloat16()" in note for note in caught.value.__notes__)
    assert hl.compare(model, copy.deepcopy(model).bfloat16(), x, batch_b=x.bfloat16())
    with pytest.raises(RuntimeError, match="dtype") as caught:
        hl.compare(copy.deepcopy(model).bfloat16(), model, x)
    assert not any("batch_b" in note for note in caught.value.__notes__)


def test_layers_that_are_quantised_and_give_floats_have_the_tolerance_of_quantised_values():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: it is to move elsewhere
        other = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
    found = hl.compare(model, other, torch.randn(8, 16))
    assert found.equal
    assert 1e-4 < found["0"].relative < 0.2
    assert [row.tolerance for row in found if row.place] == [0.2, 0.2, 0.2]
    assert not hl.compare(model, other, torch.randn(8, 16), tolerance=1e-4).equal
    other[2].set_weight_bias(
        torch.quantize_per_tensor(torch.ones(4, 32), 0.1, 0, torch.qint8), None
    )
    assert hl.compare(model, other, torch.randn(8, 16)).first.place == "2"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_fused_layers_that_are_quantised_have_that_tolerance_and_their_inputs_have_not():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU()).eval()
    model = torch.ao.quantization.fuse_modules(model, [["0", "1"]])
    other = torch.ao.quantization.quantize_dynamic(model, {type(model[0])}, torch.qint8)
    x = torch.randn(8, 16)
    found = hl.compare(model, other, x, ["0:input", "0"])
    assert found.equal
    assert [row.tolerance for row in found] == [1e-4, 0.2]
    assert found["0"].relative > 1e-4
    assert hl.compare(model, other, x, ["0:input", "0"], batch_b=x * 1.1).first.place == "0:input"


def test_nothing_is_called_equal_where_a_batch_has_no_samples():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    other = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(hl.BatchError, match=r"are empty\. Give a batch with a sample"):
        hl.compare(model, other, torch.randn(0, 4))


@pytest.mark.parametrize("verb", ["compare", "sweep", "select"])
def test_a_lazy_model_is_refused_where_a_run_is_to_leave_no_trace(verb):
    model, x = nn.Sequential(nn.LazyLinear(4), nn.ReLU()), torch.randn(2, 3)
    calls = {
        "compare": lambda: hl.compare(model, copy.deepcopy(model), x),
        "sweep": lambda: hl.sweep(model, x, -x, "0", torch.sum),
        "select": lambda: hl.select(model, "**", inputs=x),
    }
    with pytest.raises(hl.BatchError, match=r"lazy modules.*Run the model once before"):
        calls[verb]()
    assert isinstance(model[0], nn.LazyLinear)
    assert_clean(model[1])
    model(x)
    calls[verb]()
