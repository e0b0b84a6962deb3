"""Values that stay as they were, whatever is written later, for every kind of tensor."""

import ctypes
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from models import Giving
from oracles import assert_clean
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import dlpack

import hookline as hl
from hookline.values.snapshots import compact_snapshot, same_bits, snapshot

BASE = torch.arange(6.0).reshape(2, 3) + 1


def captured_output(value, **options) -> hl.Record:
    model = Giving(lambda: value)
    with hl.capture(model, "", **options) as record:
        assert model() is value
    assert_clean(model)
    return record


# -- what is written later ------------------------------------------------------------------------

ROUTES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda t: t.detach().mul_(9),
    "indexing": lambda t: t.detach().__setitem__(0, 9.0),
    "a view": lambda t: t.detach().view(-1)[1:].fill_(9),
    "out=": lambda t: torch.add(BASE, 9, out=t.detach()),
    "foreach": lambda t: torch._foreach_mul_([t.detach()], 9.0),
    ".data": lambda t: t.data.fill_(9),
    "another .data": lambda t: setattr(t, "data", torch.zeros(2, 3)),
    "storage": lambda t: t.untyped_storage().fill_(9),
    "numpy": lambda t: t.detach().numpy().fill(9),
    "numpy asarray": lambda t: np.asarray(t.detach()).fill(9),
    "dlpack": lambda t: torch.from_dlpack(t.detach()).fill_(9),
    "old dlpack": lambda t: dlpack.from_dlpack(dlpack.to_dlpack(t.detach())).fill_(9),
    "shared memory": lambda t: t.detach().share_memory_().fill_(9),
    "the address": lambda t: ctypes.memset(t.data_ptr(), 1, 24),
    "resized": lambda t: t.data.resize_(1).fill_(9),
}
each_route = pytest.mark.parametrize("write", ROUTES.values(), ids=list(ROUTES))


@each_route
def test_a_value_without_gradient_stays_as_it_was(write):
    value = BASE.clone()
    record = captured_output(value)
    write(value)
    assert torch.equal(record[""], BASE)
    assert not torch.equal(value, BASE)


@each_route
def test_a_detached_value_stays_as_it_was(write):
    value = BASE.clone().requires_grad_() * 1
    record = captured_output(value, detach=True)
    write(value)
    assert not record[""].requires_grad
    assert torch.equal(record[""], BASE)


@each_route
def test_a_value_in_a_structure_stays_as_it_was(write):
    value = BASE.clone()
    record = captured_output({"h": (value, value[:1])})
    write(value)
    assert torch.equal(record["[h][0]"], BASE)
    assert torch.equal(record["[h][1]"], BASE[:1])


@pytest.mark.parametrize(
    "write", [ROUTES[name] for name in ("in place", "indexing", "a view", "out=", "foreach")]
)
def test_reading_an_attached_value_that_was_changed_raises(write):
    value = BASE.clone().requires_grad_() * 1
    record = captured_output(value)
    assert record[""] is value
    write(value)
    with pytest.raises(hl.ValueChanged, match=r"changed.*detach=True"):
        record[""]
    assert "attached" in repr(record)


def test_reading_an_attached_value_whose_memory_was_freed_raises():
    value = BASE.clone().requires_grad_() * 1
    record = captured_output(value)
    value.untyped_storage().resize_(0)
    repr(record)
    with pytest.raises(hl.ValueChanged):
        record[""]


def test_a_snapshot_outlives_the_memory_of_its_original():
    value = BASE.clone()
    record = captured_output(value)
    value.untyped_storage().resize_(0)
    assert torch.equal(record[""], BASE)


@pytest.mark.parametrize("write", [ROUTES["in place"], ROUTES[".data"], ROUTES["storage"]])
def test_writing_to_what_was_captured_does_not_reach_the_model(write):
    value = BASE.clone()
    record = captured_output(value)
    write(record[""])
    assert torch.equal(value, BASE)


# -- aliases that were there before ---------------------------------------------------------------

ALIASES: dict[str, Callable[[Tensor], object]] = {
    ".data": lambda t: t.data,
    "view": lambda t: t.view(-1),
    "storage": lambda t: torch.empty(0).set_(t.untyped_storage(), 0, (6,)),
    "numpy": lambda t: torch.from_numpy(t.numpy()),
    "numpy view": lambda t: torch.from_numpy(t.view(-1)[2:].numpy()),
    "dlpack": lambda t: torch.from_dlpack(t),
    "numpy dlpack": lambda t: torch.from_numpy(np.from_dlpack(t)),
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=list(ALIASES))
def test_an_alias_made_before_does_not_write_into_a_snapshot(alias):
    value = BASE.clone()
    other = alias(value)
    record = captured_output(value)
    other.fill_(9)
    assert torch.equal(record[""], BASE)
    assert (value == 9).any()  # and the alias still is one


@pytest.mark.parametrize("alias", ALIASES.values(), ids=list(ALIASES))
def test_a_tensor_that_is_an_alias_stays_as_it_was(alias):
    original = BASE.clone()
    value = alias(original)
    before = value.clone()
    record = captured_output(value)
    original.fill_(9)
    assert torch.equal(record[""], before)
    assert (value == 9).all()


def test_a_buffer_that_is_shared_with_python_stays_as_it_was():
    raw = bytearray(BASE.numpy().tobytes())
    value = torch.frombuffer(raw, dtype=torch.float32)
    record = captured_output(value)
    raw[:] = b"\1" * len(raw)
    assert torch.equal(record[""], BASE.view(-1))


# -- parameters, buffers, arguments ---------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support:UserWarning")
@pytest.mark.parametrize("name", ["to_sparse", "to_sparse_csr"])
def test_a_sparse_parameter_is_read_until_it_is_changed(name):
    model = nn.Linear(3, 3, bias=False)
    model.weight = nn.Parameter(getattr(torch.eye(3), name)())
    with hl.capture(model, "weight") as record:
        model(torch.ones(2, 3))
    assert record["weight"] is model.weight
    with torch.no_grad():
        model.weight.mul_(2)
    with pytest.raises(hl.ValueChanged):
        record["weight"]


@pytest.mark.parametrize("keep", ["all", "first", "last"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_memory_of_a_parameter_can_be_freed_and_filled_again_as_by_fsdp(frozen, grad, keep):
    weight = nn.Parameter(torch.rand(64, 64), requires_grad=not frozen)
    model = Giving(lambda: weight[:48])
    before, memory = weight.detach()[:48].clone(), weight.untyped_storage()
    with torch.set_grad_enabled(grad), hl.capture(model, "", detach=True, keep=keep) as record:
        model()
    size = memory.nbytes()
    memory.resize_(0)
    memory.resize_(size)
    weight.data.fill_(7)
    assert torch.equal(record[""], before)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("detach", [False, True])
def test_a_captured_parameter_is_what_it_was_before_an_optimiser_step_or_says_not(fused, detach):
    lin = nn.Linear(3, 2)
    before = lin.weight.detach().clone()
    optimizer = torch.optim.Adam(lin.parameters(), fused=fused)
    with hl.capture(lin, "weight", detach=detach) as record:
        lin(BASE).sum().backward()
    optimizer.step()
    assert not torch.equal(lin.weight, before)
    if detach:
        assert torch.equal(record["weight"], before)
    else:
        with pytest.raises(hl.ValueChanged):
            record["weight"]
    assert_clean(lin)


def test_a_captured_parameter_that_was_not_changed_is_the_very_parameter():
    lin = nn.Linear(3, 2)
    with hl.capture(lin, "weight") as record:
        lin(BASE)
    assert record["weight"] is lin.weight


@pytest.mark.parametrize("fused", [False, True])
def test_a_captured_output_is_not_reached_by_an_optimiser_step(fused):
    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(BASE.clone())

        def forward(self) -> Tensor:
            return self.weight.detach()

    model = Weight()
    record = captured_call(model)
    model.weight.grad = torch.ones(2, 3)
    torch.optim.Adam(model.parameters(), fused=fused).step()
    assert torch.equal(record[""], BASE)


def captured_call(model: nn.Module, *args: object) -> hl.Record:
    with hl.capture(model, "") as record:
        model(*args)
    assert_clean(model)
    return record


def test_the_statistics_of_a_batch_norm_are_those_before_each_call():
    bn = nn.BatchNorm1d(3)
    twin = nn.BatchNorm1d(3)
    expected = []
    with hl.capture(bn, "running_mean", "num_batches_tracked") as record:
        for step in range(3):
            expected.append(twin.running_mean.clone())
            bn(BASE * step)
            twin(BASE * step)
    for found, wanted in zip(record.calls("running_mean"), expected, strict=True):
        assert torch.equal(found, wanted)
    assert [value.item() for value in record.calls("num_batches_tracked")] == [0, 1, 2]
    assert torch.equal(bn.running_mean, twin.running_mean)
    assert_clean(bn)


def test_buffers_parameters_and_the_models_arguments_keep_their_addresses():
    bn = nn.BatchNorm1d(3)
    x = BASE.clone()
    owned = [bn.running_mean, bn.weight, x]
    addresses = [tensor.data_ptr() for tensor in owned]
    with hl.capture(bn, "running_mean", "weight", ":input", ":inputs", detach=True) as record:
        bn(x)
    x.fill_(9)
    bn(x)
    with torch.no_grad():
        bn.weight.fill_(9)
    assert [tensor.data_ptr() for tensor in owned] == addresses
    assert torch.equal(record[":input"], BASE)
    assert torch.equal(record["weight"], torch.ones(3))


def test_values_stay_as_they_were_in_inference_mode():
    with torch.inference_mode():
        value = BASE.clone()
        record = captured_output((value, value.view(-1)))
        value.fill_(9)
        assert torch.equal(record["[0]"], BASE)
    assert torch.equal(record["[1]"], BASE.view(-1))


def test_parameters_made_in_inference_mode_are_captured():
    with torch.inference_mode():
        lin = nn.Linear(3, 2)
        before = lin.weight.detach().clone()
        with hl.capture(lin, "weight", "", ":inputs") as record:
            lin(BASE)
        model = Giving(lambda: (lin.weight, lin.weight))
        with hl.capture(model, "", "[0]") as other:
            model()
    assert torch.equal(record["weight"], before)
    assert torch.equal(other["[0]"], before)
    assert_clean(lin, model)


def test_an_in_place_layer_does_not_change_the_capture_before_it():
    model = nn.Sequential(
        nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Hardtanh(0.0, 0.1, inplace=True)
    )
    with torch.no_grad(), hl.capture(model, "*") as record:
        model(BASE)
        x = model[0](BASE)
        assert torch.equal(record["0", 0], x)
    assert torch.equal(record["1"], x.relu())
    assert torch.equal(record["2"], x.clamp(0, 0.1))
    assert_clean(model)


def test_a_snapshot_costs_no_memory_until_something_is_written():
    big = torch.zeros(1000, 1000)
    kept = snapshot(big)
    assert torch._C._is_cow_tensor(kept)
    assert torch._C._data_address(kept) == torch._C._data_address(big)


@pytest.mark.parametrize("nested", [False, True])
def test_views_of_a_large_buffer_that_is_written_to_do_not_keep_copies_of_all_of_it(nested):
    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.count = torch.zeros(1000, 1024), 0

        def forward(self, x):
            self.rows[self.count] = x
            self.count += 1
            return (self.rows[: self.count],) if nested else self.rows[: self.count]

    model = Cache()
    with torch.no_grad(), hl.capture(model, "") as record:
        for number in range(5):
            model(torch.full((1024,), number + 1.0))
    for number, value in enumerate(record.calls("")):
        value = value[0] if nested else value
        assert value[:, 0].tolist() == [n + 1 for n in range(number + 1)]
        assert value.untyped_storage().nbytes() <= 8 * value.nbytes


@pytest.mark.parametrize("keep", ["all", "first", "last"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_detached_slice_of_much_larger_memory_does_not_keep_all_of_it(grad, keep):
    made = torch.rand(16, 256, 64, requires_grad=True)
    model = Giving(lambda: (made + 1)[:, -1])
    with torch.set_grad_enabled(grad), hl.capture(model, "", detach=True, keep=keep) as record:
        model()
    assert torch.equal(record[""], made.detach()[:, -1] + 1)
    assert record[""].untyped_storage().nbytes() == record[""].nbytes


def test_a_snapshot_of_a_slice_can_let_the_rest_go():
    big = torch.zeros(100, 100)
    size = compact_snapshot(big[:, 0]).untyped_storage().nbytes()
    assert size == 400


# -- kinds of tensors -----------------------------------------------------------------------------


def mapped(tmp_path, shared) -> Tensor:
    path = tmp_path / "values"
    path.write_bytes(BASE.numpy().tobytes())
    return torch.from_file(str(path), shared=shared, size=6)


class Marked(Tensor):
    """A subclass without behaviour of its own."""


def strided(tensor: Tensor) -> Tensor:
    """What a tensor holds, in a form that torch.equal takes."""
    if tensor.is_quantized:
        return tensor.dequantize()
    if tensor.is_nested:
        return torch.cat([piece.reshape(-1) for piece in tensor.unbind()])
    return tensor.to_dense() if tensor.layout != torch.strided else tensor


KINDS = {
    "quantised": lambda: torch.quantize_per_tensor(BASE, 0.1, 0, torch.quint8),
    "quantised by channel": lambda: torch.quantize_per_channel(
        BASE, torch.ones(3), torch.zeros(3, dtype=torch.int64), 1, torch.qint8
    ),
    "quantised with floating zero points": lambda: torch.quantize_per_channel(
        BASE, torch.ones(3), torch.zeros(3), 1, torch.quint8
    ),
    "sparse": lambda: BASE.to_sparse(),
    "sparse hybrid": lambda: BASE.to_sparse(1),
    "sparse csr": lambda: BASE.to_sparse_csr(),
    "sparse csc": lambda: BASE.to_sparse_csc(),
    "sparse bsr": lambda: BASE.to_sparse_bsr((1, 1)),
    "mkldnn": lambda: BASE.to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([BASE, BASE[:1]]),
    "nested jagged": lambda: torch.nested.nested_tensor(
        [BASE[0], BASE[1, :2]], layout=torch.jagged
    ),
    "shared memory": lambda: BASE.clone().share_memory_(),
    "frombuffer": lambda: torch.frombuffer(bytearray(BASE.numpy().tobytes()), dtype=torch.float32),
    "conjugate": lambda: torch.complex(BASE, -BASE).conj(),
    "negative": lambda: torch.complex(BASE, -BASE).conj().imag,
    "complex": lambda: torch.complex(BASE, BASE),
    "channels last": lambda: torch.rand(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "transposed": lambda: BASE.t(),
    "strided": lambda: torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2)[::2, 1:],
    "expanded": lambda: BASE[:1].expand(4, 3),
    "zero size": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(3.0),
    "bfloat16": lambda: BASE.bfloat16(),
    "float8": lambda: BASE.to(torch.float8_e4m3fn),
    "bool": lambda: BASE > 2,
    "uint16": lambda: BASE.to(torch.uint16),
    "zero tensor": lambda: torch._efficientzerotensor((2, 3)),
    "subclass": lambda: BASE.clone().as_subclass(Marked),
    "parameter": lambda: nn.Parameter(BASE.clone(), requires_grad=False),
    "buffer": lambda: nn.Buffer(BASE.clone()),
}


def tensor_of_kind(kind: str) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes and deprecations, all torch's own
        return KINDS[kind]()


def dense_bits(tensor: Tensor) -> Tensor:
    dense = strided(tensor).detach().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).clone()


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tensor_is_captured_with_its_values_and_its_layout(kind, detach):
    value = tensor_of_kind(kind)
    before = dense_bits(value)
    record = captured_output(value, detach=detach)
    text = repr(record) + record._repr_html_()
    assert str(value.dtype).removeprefix("torch.") in text
    assert isinstance(record.nbytes, int)
    if kind == "quantised with floating zero points":
        return  # cannot be cloned: kept or refused on reading, but never in the forward
    kept = record[""]
    assert kept is not value
    assert (kept.dtype, kept.layout, kept.device) == (value.dtype, value.layout, value.device)
    if not value.is_nested:
        assert kept.shape == value.shape
    if kind in ("channels last", "transposed", "strided"):
        assert kept.stride() == value.stride()
    assert torch.equal(dense_bits(kept), before)
    assert torch.equal(dense_bits(value), before)


@pytest.mark.parametrize("shared", [False, True])
def test_a_mapped_file_is_captured_as_it_was(tmp_path, shared):
    value = mapped(tmp_path, shared)
    record = captured_output(value)
    value.fill_(9)
    assert torch.equal(record[""], BASE.view(-1))


@pytest.mark.parametrize(
    "kind",
    [
        name
        for name in KINDS
        if name not in ("expanded", "zero size", "zero tensor", "bool", "mkldnn", "nested jagged")
        and not name.startswith(("sparse", "quantised"))
    ],
)
def test_every_kind_of_tensor_stays_as_it_was(kind):
    value = tensor_of_kind(kind)
    before = dense_bits(value)
    record = captured_output(value)
    value.fill_(0)
    assert torch.equal(dense_bits(record[""]), before)


def test_the_values_of_a_sparse_tensor_stay_as_they_were():
    for value in (BASE.to_sparse().coalesce(), tensor_of_kind("sparse csr")):
        record = captured_output(value)
        value.values().zero_()
        assert torch.equal(record[""].to_dense(), BASE)


def test_a_quantised_tensor_stays_as_it_was():
    value = tensor_of_kind("quantised")
    record = captured_output(value)
    value.copy_(torch.zeros(2, 3))
    assert torch.equal(record[""].dequantize(), BASE)


@pytest.mark.parametrize("grad", [False, True])
def test_a_meta_tensor_is_captured(grad):
    value = torch.empty(2, 3, device="meta", requires_grad=grad)
    record = captured_output(value)
    assert record[""].is_meta
    assert record[""].shape == (2, 3)
    assert (record[""] is value) == grad
    repr(record)


def test_a_fake_tensor_is_captured():
    with FakeTensorMode() as mode:
        value = mode.from_tensor(BASE)
        record = captured_output(value)
    assert type(record[""]) is type(value)
    assert record[""].shape == (2, 3)
    repr(record)


@pytest.mark.parametrize("grad", [False, True])
def test_a_distributed_tensor_is_captured(grad):
    from torch import distributed
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        local = BASE.clone()
        value = DTensor.from_local(local, mesh, [Shard(0)], run_check=False).requires_grad_(grad)
        record = captured_output(value)
        snapped = captured_output(value, detach=True)
        assert isinstance(record[""], DTensor)
        assert (record[""] is value) == grad
        local.fill_(9)
        assert torch.equal(snapped[""].to_local(), BASE)
        assert snapped[""].placements == (Shard(0),)
        assert "(4, 3)" in repr(snapped)
    finally:
        distributed.destroy_process_group()


def test_a_complex_value_keeps_its_imaginary_part_when_the_precision_changes():
    record = captured_output(torch.complex(BASE, BASE), dtype=torch.float64)
    assert torch.equal(record[""], torch.complex(BASE, BASE).to(torch.complex128))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_whole_numbers_keep_their_dtype_when_the_precision_changes(dtype):
    record = captured_output((BASE, torch.arange(3), BASE > 2), dtype=dtype)
    assert [part.dtype for part in record[""]] == [dtype, torch.int64, torch.bool]


# -- transformed functions ------------------------------------------------------------------------


def right_or_refused(record: hl.Record, expected: Tensor) -> bool:
    """A value whose transform is over reads right, or is refused with the reason."""
    repr(record)
    try:
        return torch.equal(record[""] + 0, expected)
    except hl.HooklineError as error:
        return "torch.func" in str(error)


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize(
    "transform",
    [
        lambda model: torch.vmap(model)(BASE),
        lambda model: torch.func.grad(lambda x: model(x).sum())(BASE),
        lambda model: torch.vmap(torch.func.grad(lambda x: model(x).sum()))(BASE),
        lambda model: torch.func.jvp(model, (BASE,), (torch.ones(2, 3),))[1],
        lambda model: torch.func.functionalize(model)(BASE),
    ],
    ids=["vmap", "grad", "vmap of grad", "jvp", "functionalize"],
)
def test_a_transform_gives_the_same_with_a_capture_and_the_value_is_right_or_refused(
    transform, detach
):
    model = Giving(lambda x: x * x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, at the first jvp
        bare = transform(model)
    with hl.capture(model, "", detach=detach) as record:
        assert torch.equal(transform(model), bare)
    assert right_or_refused(record, BASE * BASE)
    assert_clean(model)


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("transform", [torch.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())])
def test_a_value_can_be_read_inside_its_transform_and_stays_as_it_was(transform, detach):
    def inside(model):
        def run(x):
            with hl.capture(model, "", detach=detach) as record:
                value = model(x)
            if detach:
                value.mul_(5)
            return record[""] * x

        return run

    found = transform(inside(Giving(lambda x: x * 2)))(BASE)
    expected = transform(lambda x: (x * 2).detach() * x if detach else x * 2 * x)(BASE)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, 0], lambda x: x[:1, 0], lambda x: x[1, 1], lambda x: x[:0, 0],
        lambda x: x[0, 0].expand(4), lambda x: x.conj(), lambda x: x.conj().imag,
    ],
)  # fmt: skip
def test_the_bits_of_any_view_can_be_compared(view):
    one = view(torch.randn(4, 3, dtype=torch.complex64))
    assert same_bits(one, one.clone(memory_format=torch.contiguous_format))
    assert not one.numel() or not same_bits(one, one + 1)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_tensors_can_be_compared():
    one = torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8)
    assert same_bits(one, one.clone())
    assert not same_bits(one, torch.quantize_per_tensor(torch.ones(3, 3), 0.1, 0, torch.qint8))


def test_a_parameter_that_was_captured_inside_its_edit_is_said_to_have_changed():
    model = nn.Linear(2, 2)
    with hl.edit(model, "weight", hl.zero()), hl.capture(model, "weight") as record:
        model(torch.ones(1, 2))
        assert not record["weight"].any()
    with pytest.raises(hl.ValueChanged, match=r"changed in place since\. Capture with detach"):
        record["weight"]
