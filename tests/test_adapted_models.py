"""Models that other libraries have changed: offloaded by accelerate, adapted by PEFT, quantised by
torchao."""

import copy
from contextlib import contextmanager
from functools import partial

import accelerate
import peft
import pytest
import torch
from oracles import assert_clean, assert_same_state, bits, state_bits
from torch import nn
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
    to_nf4,
)

import hookline as hl


class NormedNet(nn.Module):
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
    model = NormedNet()
    model(X)
    return model.eval()


# -- offloaded by accelerate ----------------------------------------------------------------------


def on_disk(model, folder):
    offloaded = accelerate.disk_offload(
        model, folder, execution_device="cpu", offload_buffers=True,
        preload_module_classes=["NormedNet"],
    )  # fmt: skip
    return offloaded


def half_on_disk(model, folder):
    places = {"block": "cpu", "scales": "cpu", "head": "disk"}
    return accelerate.dispatch_model(
        model, places, main_device="cpu", offload_dir=folder, force_hooks=True
    )


def on_cpu(model, folder):
    return accelerate.cpu_offload(
        model, execution_device="cpu", offload_buffers=True, preload_module_classes=["NormedNet"]
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
        accelerate.cpu_offload(model, execution_device="cpu", preload_module_classes=["NormedNet"])
    hl.harvest(plain, [X], "block", to=tmp_path / "store", quiet=True)
    with pytest.raises(hl.HarvestError, match="weights or modules are others"):
        hl.harvest(other, [X], "block", to=tmp_path / "store", quiet=True)


def test_a_harvest_of_a_model_without_data_is_refused(tmp_path):
    with torch.device("meta"):
        model = NormedNet()
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


def test_watch_says_which_parameters_it_does_not_see(plain, offloaded):
    watching = hl.watch(offloaded, every=1)
    with pytest.warns(hl.HooklineWarning, match=r"'head.weight'.* are measured.*accelerate"):
        watching.attach()
    offloaded(X).sum().backward()
    watching.step()
    watching.remove()
    output, found = plain(X), watching.last["head", "output"]
    assert found["mean"] == pytest.approx(float(output.detach().mean()), rel=1e-4)


def test_guard_finds_the_origin_in_an_offloaded_model(offloaded):
    offloaded.block[2].forward = lambda x: torch.log(x * 0 - 1)
    try:
        with pytest.raises(hl.NonFiniteError, match=r"'block\.2/log'"):
            with hl.guard(offloaded, to=None):
                offloaded(X)
    finally:
        del offloaded.block[2].forward


# -- adapted by PEFT ------------------------------------------------------------------------------

HEAD = "base_model.model.head"


def lora(**options):
    return peft.LoraConfig(
        target_modules=["head", "0"], r=2, init_lora_weights=False, lora_dropout=0.0, **options
    )


@pytest.fixture
def adapted(plain):
    """The same model with a LoRA adapter at two of its layers."""
    model = peft.get_peft_model(copy.deepcopy(plain), lora()).eval()
    yield model
    assert_clean(model)


def test_the_parts_of_an_adapted_layer_add_up_to_its_output(adapted):
    places = [HEAD, f"{HEAD}.base_layer", f"{HEAD}.lora_B.default"]
    with torch.no_grad(), hl.capture(adapted, places) as record:
        output = adapted(X)
    whole, base, low = (record[place] for place in places)
    layer = adapted.get_submodule(HEAD)
    assert torch.equal(whole, output)
    assert torch.equal(whole, base + low * layer.scaling["default"])


@pytest.mark.parametrize("place", [f"{HEAD}.lora_B.default", f"{HEAD}.lora_B.default.weight"])
def test_an_adapter_that_is_edited_to_zero_leaves_the_base_layer(adapted, place):
    before = state_bits(adapted)
    with torch.no_grad(), hl.edit(adapted, place, hl.zero()), hl.capture(adapted, "**") as record:
        adapted(X)
    assert torch.equal(record[HEAD], record[f"{HEAD}.base_layer"])
    assert_same_state(adapted, before)


def test_gradients_of_adapters_are_captured_and_those_of_frozen_weights_refused(adapted):
    names = [f"{HEAD}.lora_A.default.weight", f"{HEAD}.lora_B.default.weight"]
    with hl.capture(adapted, [f"{n}:grad" for n in names], f"{HEAD}.base_layer.*:grad") as record:
        adapted(X).square().sum().backward()
    for name in names:
        assert torch.equal(record[f"{name}:grad"], hl.get_parameter(adapted, name).grad)
    with pytest.raises(hl.GradientNotAvailable, match="does not require grad"):
        record[f"{HEAD}.base_layer.weight:grad"]


def test_an_edit_of_an_adapters_gradient_reaches_its_optimizer(adapted):
    with hl.edit(adapted, f"{HEAD}.lora_A.default.weight:grad", hl.zero()):
        adapted(X).sum().backward()
    assert not adapted.get_submodule(f"{HEAD}.lora_A.default").weight.grad.any()
    assert adapted.get_submodule(f"{HEAD}.lora_B.default").weight.grad.any()


def switched_off(model):
    return model.disable_adapter()


@contextmanager
def merged(model):
    model.merge_adapter()
    try:
        yield
    finally:
        model.unmerge_adapter()


@pytest.mark.parametrize("inside", [switched_off, merged])
def test_adapters_that_are_not_called_are_told_of(adapted, inside):
    with inside(adapted), torch.no_grad():
        with hl.capture(adapted, HEAD, f"{HEAD}.*") as record:
            output = adapted(X)
        assert torch.equal(record[HEAD], output)
        assert torch.equal(record[f"{HEAD}.base_layer"], output)
        with pytest.raises(hl.NeverFired, match=r"lora_A.default.*its module was not called"):
            with hl.capture(adapted, f"{HEAD}.lora_A.default"):
                adapted(X)
        with pytest.raises(hl.NeverFired, match=r"lora_A.default.*its module was not called"):
            with hl.edit(adapted, f"{HEAD}.lora_A.default", hl.zero()):
                adapted(X)


def test_a_merged_weight_is_read_and_edited_as_it_is_used(plain, adapted):
    name = f"{HEAD}.base_layer.weight"
    with merged(adapted), torch.no_grad():
        with hl.capture(adapted, name) as record:
            adapted(X)
        weight = adapted.get_submodule(HEAD).base_layer.weight
        assert torch.equal(record[name], weight)
        assert not torch.equal(record[name], plain.head.weight)
        with hl.edit(adapted, name, hl.replace(plain.head.weight)):
            with hl.capture(adapted, HEAD, f"{HEAD}:input") as record:
                adapted(X)
    assert torch.equal(record[HEAD], plain.head(record[f"{HEAD}:input"]))


def test_of_several_adapters_the_active_one_is_called(adapted):
    adapted.add_adapter("other", lora())
    adapted.set_adapter("other")
    with torch.no_grad(), hl.capture(adapted, f"{HEAD}.lora_A.*") as record:
        adapted(X)
    assert record.places() == [f"{HEAD}.lora_A.other"]
    assert list(record.unfired()) == [f"{HEAD}.lora_A.default"]


def test_measure_harvest_and_sweep_run_an_adapted_model(adapted, tmp_path):
    with torch.no_grad():
        expected = adapted(X)
    found = hl.measure(adapted, HEAD, statistics=[hl.Mean()], data=[X, X])
    torch.testing.assert_close(found[HEAD]["mean"], expected.double().mean(0))
    store = hl.harvest(adapted, [X], HEAD, to=tmp_path / "acts", quiet=True)
    assert torch.equal(store[HEAD][:], expected)
    places = [f"{HEAD}.base_layer", HEAD]
    sweep = hl.sweep(adapted, X, X + 1, places, lambda out: out.sum(), progress=False)
    assert sweep.clean == pytest.approx(float(expected.sum()), rel=1e-6)
    assert [row.share for row in sweep.rows if row.place == HEAD] == [pytest.approx(1.0)]


def scaled_up(model):
    model.get_submodule(HEAD).scaling["default"] *= 2


def another(model):
    model.add_adapter("other", lora())
    model.set_adapter("other")


@pytest.mark.parametrize(
    "change", [lambda model: model.base_model.disable_adapter_layers(), scaled_up, another]
)
def test_a_harvest_does_not_go_on_with_other_adapters(adapted, tmp_path, change):
    hl.harvest(adapted, [X], HEAD, to=tmp_path / "acts", quiet=True)
    change(adapted)
    with pytest.raises(hl.HarvestError, match="weights or modules are others"):
        hl.harvest(adapted, [X], HEAD, to=tmp_path / "acts", quiet=True)


# -- quantised by torchao -------------------------------------------------------------------------


@pytest.fixture(
    params=[Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig],
    ids=["weights", "weights and values"],
)
def quantised(request, plain):
    """The same model with weights in 8 bits."""
    model = copy.deepcopy(plain)
    quantize_(model, request.param())
    output = model(X)
    yield model
    assert torch.equal(model(X), output)
    assert_clean(model)


def weight_bits(weight):
    return [bits(getattr(weight, name)) for name in weight.__tensor_flatten__()[0]]


def test_outputs_of_a_quantised_model_are_captured_and_edited_exactly(quantised):
    with torch.no_grad(), hl.capture(quantised, "head", "head:input") as record:
        output = quantised(X)
    assert torch.equal(record["head"], output)
    assert torch.equal(record["head"], quantised.head(record["head:input"]))
    with torch.no_grad(), hl.edit(quantised, "block", hl.scale(2.0)):
        edited = quantised(X)
    with torch.no_grad():
        assert torch.equal(edited, quantised.head(2.0 * quantised.block(X) * quantised.scales[0]))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("detach", [False, True])
def test_a_captured_quantised_weight_stays_as_it_was_or_reading_it_raises(
    quantised, trained, detach
):
    weight = quantised.head.weight.requires_grad_(trained)
    before = weight_bits(weight)
    with hl.capture(quantised, "head.weight", detach=detach) as record:
        quantised(X)
    assert type(record["head.weight"]) is type(weight)
    assert all(map(torch.equal, weight_bits(record["head.weight"]), before))
    kept = weight.qdata.clone()
    with torch.no_grad():
        weight.qdata.zero_()
    if trained and not detach:
        with pytest.raises(hl.ValueChanged):
            record["head.weight"]
    else:
        assert all(map(torch.equal, weight_bits(record["head.weight"]), before))
    weight.qdata.copy_(kept)
    weight.requires_grad_(False)


def test_an_edit_of_a_quantised_weight_is_refused_and_preserve_puts_it_back(quantised):
    with pytest.raises(hl.NotHookable, match=r"kept in a Int8Tensor.*within hookline.preserve"):
        hl.edit(quantised, "head.weight", hl.zero()).attach()
    with hl.preserve(quantised), torch.no_grad():
        quantised.head.weight.qdata.zero_()


def test_gradients_in_a_model_with_quantised_weights_are_those_of_torch(plain):
    quantize_(plain, Int8WeightOnlyConfig())
    with hl.capture(plain, "head:grad_input", "block:grad_output") as record:
        plain(X).square().sum().backward()
    output = plain(X).detach().requires_grad_()
    output.square().sum().backward()
    given = (plain.block(X) * plain.scales[0]).detach().requires_grad_()
    plain.head(given).backward(output.grad)
    assert torch.equal(record["head:grad_input"], given.grad)
    assert torch.equal(record["block:grad_output"], given.grad * plain.scales[0])


def test_measure_of_a_quantised_model_is_exact_and_of_its_weights_refused(quantised):
    with torch.no_grad():
        expected = quantised(X).double().mean(0)
    found = hl.measure(quantised, "head", statistics=[hl.Mean()], data=[X])
    torch.testing.assert_close(found["head"]["mean"], expected)
    with pytest.raises(hl.StatisticsError, match=r"is Int8Tensor.*value\.dequantize\(\)"):
        hl.measure(quantised, "head.weight", statistics=[hl.Mean()], data=[X])
    numbers = quantised.head.weight.dequantize()
    found = hl.measure(
        quantised, "head.weight", statistics=[hl.Mean()], data=[X], at=lambda w: w.dequantize()
    )
    torch.testing.assert_close(found["head.weight"]["mean"], numbers.double().mean(0))


def test_harvest_of_a_quantised_model_stores_its_outputs_and_knows_its_weights(quantised, tmp_path):
    store = hl.harvest(quantised, [X], "head", to=tmp_path / "acts", quiet=True)
    assert torch.equal(store["head"][:], quantised(X).detach())
    hl.harvest(quantised, [X], "head", to=tmp_path / "acts", quiet=True)
    kept = quantised.head.weight.qdata[0, 0].clone()
    quantised.head.weight.qdata[0, 0] += 1
    with pytest.raises(hl.HarvestError, match="weights or modules are others"):
        hl.harvest(quantised, [X], "head", to=tmp_path / "acts", quiet=True)
    quantised.head.weight.qdata[0, 0] = kept


def test_sweep_of_a_quantised_model_is_exact(quantised):
    sweep = hl.sweep(quantised, X, X + 1, "block", lambda out: out.sum(), progress=False)
    assert sweep.clean == pytest.approx(quantised(X).sum().item(), rel=1e-6)
    assert sweep.rows[0].share == pytest.approx(1.0)


def test_summarize_of_a_quantised_model_counts_its_memory_and_all_operations(plain, quantised):
    found, expected = hl.summarize(quantised, X), hl.summarize(plain, X)
    assert [(row.place, row.flops) for row in found] == [(row.place, row.flops) for row in expected]
    weight = quantised.head.weight
    held = sum(getattr(weight, name).nbytes for name in weight.__tensor_flatten__()[0])
    assert found["head"].parameter_bytes == held + quantised.head.bias.nbytes


def test_a_quantised_weight_is_compared_by_the_numbers_that_it_stands_for(plain, quantised):
    (row,) = hl.compare(plain, quantised, X, "head.weight")
    error = (quantised.head.weight.dequantize() - plain.head.weight.detach()).abs().max()
    assert row.error == pytest.approx(float(error))


def test_a_record_of_a_quantised_weight_is_not_saved(quantised, tmp_path):
    with torch.no_grad(), hl.capture(quantised, "head.weight", "head") as record:
        quantised(X)
    with pytest.raises(hl.RecordError, match=r"holds a Int8Tensor.*transform="):
        hl.save_record(record, tmp_path / "record")


def test_a_report_of_a_quantised_model_can_be_written(quantised, tmp_path):
    assert hl.report(quantised, tmp_path / "report.html", batch=X).stat().st_size


def test_guard_names_what_came_in_bad_into_a_quantised_model(quantised):
    with pytest.raises(hl.NonFiniteError, match=r"model's input ':inputs\[x\]'"):
        with torch.no_grad(), hl.guard(quantised):
            quantised(X / 0.0)


def test_weights_in_four_bits_are_captured_and_compared_by_the_numbers_that_they_stand_for():
    plain, model = nn.Linear(128, 128), nn.Linear(128, 128)
    model.weight = nn.Parameter(to_nf4(plain.weight.detach()), requires_grad=False)
    numbers, x = model.weight.get_original_weight(), torch.randn(2, 128)
    with torch.no_grad(), hl.capture(model, "weight") as record:
        model(x)
    assert torch.equal(record["weight"].get_original_weight(), numbers)
    with hl.preserve(model), torch.no_grad():
        model.weight.quantized_data.zero_()
    assert torch.equal(model.weight.get_original_weight(), numbers)
    (row,) = hl.compare(plain, model, x, "weight")
    assert row.error == pytest.approx(float((numbers - plain.weight.detach()).abs().max()))
