"""Models that other libraries have changed: offloaded by accelerate, adapted by PEFT, quantised by
torchao."""

import copy
from functools import partial

import accelerate
import pytest
import torch
from helpers import assert_clean, bits
from torch import nn

import hookline as hl


class Net(nn.Module):
    """Layers and a norm with buffers, and a list of parameters that is used by the model itself."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh())
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(32))])
        self.head = nn.Linear(32, 32)

    def forward(self, x):
        return self.head(self.block(x) * self.scales[0])


X = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def plain():
    """A model in memory, with running statistics that are not those of the beginning."""
    torch.manual_seed(0)
    model = Net()
    model(X)
    return model.eval()


# -- offloaded by accelerate ----------------------------------------------------------------------


def on_disk(model, folder):
    offloaded = accelerate.disk_offload(
        model, folder, execution_device="cpu", offload_buffers=True,
        preload_module_classes=["Net"],
    )  # fmt: skip
    return offloaded


def half_on_disk(model, folder):
    places = {"block": "cpu", "scales": "cpu", "head": "disk"}
    return accelerate.dispatch_model(
        model, places, main_device="cpu", offload_dir=folder, force_hooks=True
    )


def on_cpu(model, folder):
    return accelerate.cpu_offload(
        model, execution_device="cpu", offload_buffers=True, preload_module_classes=["Net"]
    )


def layer_by_layer(offload, model, folder):
    """The layers by themselves; a list of parameters cannot be, as it is never called."""
    scales, model.scales = model.scales, nn.ModuleList()
    offload(model, folder)
    model.scales = scales
    return model


def layers_on_cpu(model, folder):
    return accelerate.cpu_offload(model, execution_device="cpu", offload_buffers=True)


def layers_on_disk(model, folder):
    return accelerate.disk_offload(model, folder, execution_device="cpu", offload_buffers=True)


@pytest.fixture(
    params=[
        on_disk,
        on_cpu,
        half_on_disk,
        partial(layer_by_layer, layers_on_cpu),
        partial(layer_by_layer, layers_on_disk),
    ],
    ids=["all on disk", "all on the CPU", "half on disk", "layers on the CPU", "layers on disk"],
)
def offloaded(request, plain, tmp_path):
    """The same model as `plain`, offloaded."""
    model = request.param(copy.deepcopy(plain), str(tmp_path / "weights"))
    assert model.head.weight.is_meta
    before = [(name, tensor.device) for name, tensor in model.state_dict(keep_vars=True).items()]
    hooks = [module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook")]
    yield model
    after = [(name, tensor.device) for name, tensor in model.state_dict(keep_vars=True).items()]
    assert after == before
    assert hooks == [m._hf_hook for m in model.modules() if hasattr(m, "_hf_hook")]
    assert torch.equal(model(X), plain(X))
    assert_clean(model)


TENSORS = ["head.weight", "block.0.bias", "block.1.running_mean", "scales.0"]


@pytest.mark.parametrize("detach", [False, True])
def test_what_is_captured_of_an_offloaded_tensor_is_its_data(plain, offloaded, detach):
    with torch.no_grad(), hl.capture(offloaded, TENSORS, detach=detach) as record:
        offloaded(X)
    for name in TENSORS:
        found, expected = record[name], hl.get_parameter(plain, name)
        assert found.dtype is expected.dtype
        assert torch.equal(bits(found), bits(expected)), name


def test_what_is_captured_of_an_offloaded_tensor_beside_its_module_is_its_data(plain, offloaded):
    places = ["head.weight", "head:input", "head", "head:grad_input"]
    with hl.capture(offloaded, places) as record:
        offloaded(X).sum().backward()
    with hl.capture(plain, places) as expected:
        plain(X).sum().backward()
    for place in places:
        assert torch.equal(record[place], expected[place]), place


def test_a_part_of_an_offloaded_tensor_is_captured(plain, offloaded):
    with torch.no_grad(), hl.capture(offloaded, "head.weight", at=(slice(4), 0)) as record:
        offloaded(X)
    assert torch.equal(record["head.weight"], plain.head.weight[:4, 0])


def test_get_parameter_gives_the_data_of_an_offloaded_tensor(plain, offloaded):
    for name in TENSORS:
        found = hl.get_parameter(offloaded, name)
        assert torch.equal(found, hl.get_parameter(plain, name)), name
    found = hl.get_parameter(offloaded, "head.weight")
    found.zero_()  # it is a copy: the model is as before, which the fixture checks


def test_a_hook_at_an_offloaded_tensor_meets_its_data(plain, offloaded):
    found = []
    with hl.hook(offloaded, "head.weight", found.append):
        offloaded(X)
    assert torch.equal(found[0], plain.head.weight)


def test_a_forward_that_is_ended_early_leaves_nothing_loaded(plain, offloaded):
    with torch.no_grad(), hl.capture(offloaded, "block.0", stop=True) as record:
        offloaded(X)
    with torch.no_grad():
        assert torch.equal(record["block.0"], plain.block[0](X))


def test_an_edit_of_an_offloaded_tensor_is_refused_or_exact(offloaded):
    with pytest.raises(hl.NotHookable, match=r"'head.weight' was to be.*offloaded.*Load it all"):
        with hl.edit(offloaded, "head.weight", hl.zero()):
            offloaded(X)


def test_an_edit_of_what_stays_in_memory_beside_offloaded_layers_is_exact(plain, tmp_path):
    model = half_on_disk(copy.deepcopy(plain), str(tmp_path))
    with hl.edit(model, "block.0.weight", hl.scale(2.0)):
        found = model(X)
    with hl.edit(plain, "block.0.weight", hl.scale(2.0)):
        assert torch.equal(found, plain(X))


@pytest.mark.parametrize("place", ["head.weight:grad", "*.weight:grad"])
def test_the_gradient_of_an_offloaded_parameter_is_refused_with_the_reason(offloaded, place):
    with hl.capture(offloaded, place) as record:
        offloaded(X).sum().backward()
    with pytest.raises(hl.GradientNotAvailable, match="accelerate has offloaded the parameter"):
        record["head.weight:grad"]


def test_an_edit_of_the_gradient_of_an_offloaded_parameter_is_refused_with_the_reason(offloaded):
    with pytest.raises(hl.NeverFired, match="accelerate has offloaded the parameter"):
        with hl.edit(offloaded, "head.weight:grad", hl.zero()):
            offloaded(X).sum().backward()


def test_measure_of_an_offloaded_model_gives_what_it_gives_of_the_plain_one(plain, offloaded):
    places, kinds = ["block.2", "head.weight"], [hl.Mean(), hl.Variance()]
    found, expected = (
        hl.measure(model, places, statistics=kinds, data=[X, 2 * X]) for model in (offloaded, plain)
    )
    for place in places:
        for name, result in expected[place].items():
            assert torch.equal(found[place][name], result), (place, name)


def test_harvest_of_an_offloaded_model_stores_what_it_stores_of_the_plain_one(
    plain, offloaded, tmp_path
):
    store = hl.harvest(offloaded, [X, 2 * X], "block", to=tmp_path / "store", quiet=True)
    with torch.no_grad():
        assert torch.equal(store["block"][:], torch.cat([plain.block(X), plain.block(2 * X)]))
    # The weights are known by what they are, wherever they are.
    assert len(hl.harvest(plain, [X, 2 * X], "block", to=tmp_path / "store", quiet=True)) == 10


def test_a_harvest_does_not_go_on_with_other_offloaded_weights(plain, tmp_path):
    other = copy.deepcopy(plain)
    nn.init.zeros_(other.head.weight)
    for model in (plain, other):
        accelerate.cpu_offload(model, execution_device="cpu", preload_module_classes=["Net"])
    hl.harvest(plain, [X], "block", to=tmp_path / "store", quiet=True)
    with pytest.raises(hl.HarvestError, match="weights or modules are others"):
        hl.harvest(other, [X], "block", to=tmp_path / "store", quiet=True)


def test_a_harvest_of_a_model_without_data_is_refused(tmp_path):
    with torch.device("meta"):
        model = Net()
    with pytest.raises(hl.HarvestError, match=r"meta device, without data.*Load its weights"):
        hl.harvest(model, [X], "block", to=tmp_path / "store", quiet=True)


@pytest.mark.parametrize("approximate", [False, True])
def test_sweep_of_an_offloaded_model_finds_what_it_finds_in_the_plain_one(
    plain, offloaded, approximate
):
    def swept(model):
        return hl.sweep(
            model, X, X + 1, "block.*", lambda out: out.sum(), approximate=approximate,
            progress=False,
        )  # fmt: skip

    assert repr(swept(offloaded)) == repr(swept(plain))


def test_summarize_of_an_offloaded_model_counts_what_it_counts_in_the_plain_one(plain, offloaded):
    def counted(model, batch):
        costs = hl.summarize(model, batch, backward=True).to_dict()["modules"]
        cells = "place", "parameters", "flops", "backward_flops", "activation_bytes"
        return [[row[cell] for cell in cells] for row in costs]

    for batch in (X, (5, 32)):
        assert counted(offloaded, batch) == counted(plain, batch)


def test_an_offloaded_model_is_compared_with_the_plain_one(plain, offloaded):
    found = hl.compare(plain, offloaded, X)
    assert found.equal
    assert {row.error for row in found} == {0.0}


def test_a_report_of_an_offloaded_model_can_be_written(offloaded, tmp_path):
    assert hl.report(offloaded, tmp_path / "report.html", batch=X).stat().st_size


def test_guard_finds_the_origin_in_an_offloaded_model(offloaded):
    offloaded.block[2].forward = lambda x: torch.log(x * 0 - 1)
    try:
        with pytest.raises(hl.NonFiniteError, match=r"'block\.2/log'"):
            with hl.guard(offloaded, to=None):
                offloaded(X)
    finally:
        del offloaded.block[2].forward
