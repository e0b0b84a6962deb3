"""preserve restores parameters, buffers and attributes."""

import copy
import gc

import pytest
import torch
from models import Blocks, TiedLayers, mlp
from oracles import assert_clean, assert_same_state, state_bits
from torch import nn
from torch.utils._pytree import tree_map

import hookline as hl

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))


# -- what is put back -----------------------------------------------------------------------------


def test_preserve_puts_back_values_objects_and_requires_grad():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    before = state_bits(model)
    objects = dict(model.state_dict(keep_vars=True))
    with hl.preserve(model):
        with torch.no_grad():
            model[0].weight.normal_()
        model[0].bias = nn.Parameter(torch.ones(4))
        model[0].weight.requires_grad_(False)
        model[1].running_mean = torch.ones(4)
        model(X)
    assert_same_state(model, before)
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is tensor for name, tensor in objects.items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not model[1].running_mean.requires_grad


def test_preserve_keeps_the_statistics_of_batchnorm():
    model = nn.Sequential(nn.BatchNorm1d(3))
    before = state_bits(model)
    with hl.preserve(model):
        model(X)
        assert model[0].num_batches_tracked == 1
    assert_same_state(model, before)


def test_preserve_takes_places_of_tensors_and_modules():
    for where, kept in [
        (("0.weight",), {"0.weight"}),
        (("0",), {"0.weight", "0.bias"}),
        (("**.bias",), {"0.bias", "2.bias"}),
        ((nn.Linear,), {"0.weight", "0.bias", "2.weight", "2.bias"}),
        (("2", "0.bias"), {"0.bias", "2.weight", "2.bias"}),
    ]:
        model = mlp()
        before = state_bits(model)
        with hl.preserve(model, *where), torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(9)
        after = state_bits(model)
        assert {name for name in after if torch.equal(after[name], before[name])} == kept


def test_preserve_takes_containers():
    model = Blocks()
    before = state_bits(model)
    for where in (("layers", "scales"), ("*",), ("",), ()):
        with hl.preserve(model, *where), torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(9)
        assert_same_state(model, before)
    layers = nn.ModuleList([nn.Linear(2, 2)])
    before = state_bits(layers)
    with hl.preserve(layers), torch.no_grad():
        layers[0].weight.fill_(9)
    assert_same_state(layers, before)


def test_preserve_puts_back_what_was_none():
    model = Blocks()
    with hl.preserve(model):
        model(X)
        assert model.mask is not None
    assert model.mask is None
    linear = nn.Linear(2, 2, bias=False)
    with hl.preserve(linear):
        linear.bias = nn.Parameter(torch.ones(2))
    assert linear.bias is None
    assert "bias" in linear._parameters


def test_preserve_puts_back_what_was_set_to_none_or_deleted_in_the_old_order():
    model = mlp()
    before = state_bits(model)
    names = [name for name, _ in model.named_parameters()]
    with hl.preserve(model):
        model[0].bias = None
        del model[2].weight
        model[2].weight = nn.Parameter(torch.ones(2, 4))
    assert [name for name, _ in model.named_parameters()] == names
    assert_same_state(model, before)


@pytest.mark.parametrize("as_buffer", [True, False])
def test_preserve_puts_back_a_parameter_that_became_a_plain_tensor(as_buffer):
    model = mlp()
    before, weight = state_bits(model), model[0].weight
    with hl.preserve(model):
        del model[0].weight
        if as_buffer:
            model[0].register_buffer("weight", torch.zeros(4, 3))
        else:
            model[0].weight = torch.zeros(4, 3)
        model(X)
    assert model[0].weight is weight
    assert "weight" not in model[0].__dict__
    assert "weight" not in model[0]._buffers
    assert_same_state(model, before)


def test_preserve_warns_of_a_parametrization_that_hides_what_it_put_back():
    model = nn.Sequential(nn.Linear(2, 2))
    weight, before = model[0].weight, model[0].weight.detach().clone()
    with hl.preserve(model):
        nn.utils.parametrizations.orthogonal(model[0])
        nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert model[0].weight is weight
    assert torch.equal(weight, before)
    with pytest.warns(hl.HooklineWarning, match="'weight' .* parametrization hides it"):
        with hl.preserve(model):
            nn.utils.parametrizations.orthogonal(model[0])
    assert torch.equal(weight, before)


def test_preserve_puts_back_shapes_and_strides():
    model = mlp()
    before, shape = state_bits(model), model[0].weight.shape
    with hl.preserve(model):
        model[0].weight.data = model[0].weight.data[:2]
    assert model[0].weight.shape == shape
    with hl.preserve(model):
        model[2].weight.data = model[2].weight.data.t()
    assert model[2].weight.shape == (2, 4)
    assert model[2].weight.is_contiguous()
    assert_same_state(model, before)


def test_preserve_puts_back_a_dtype_that_was_read_into_the_same_memory():
    model = mlp()
    before = state_bits(model)
    with hl.preserve(model):
        model[0].weight.requires_grad_(False)
        model[0].weight.data = model[0].weight.data.view(torch.int32)
    assert model[0].weight.dtype == torch.float32
    assert model[0].weight.requires_grad
    assert_same_state(model, before)


def test_preserve_fills_memory_that_was_freed_inside():
    model = mlp()
    before = state_bits(model)
    with hl.preserve(model):
        model[0].weight.untyped_storage().resize_(0)
    assert_same_state(model, before)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.eye(3), 0.5, 0, torch.qint8),
    ],
    ids=["sparse", "sparse rows", "quantised"],
)
def test_preserve_takes_buffers_of_any_layout(make):
    model = mlp()
    model.register_buffer("other", make())
    before, other = model.other.to_dense() if model.other.is_sparse else None, model.other
    with hl.preserve(model), torch.no_grad():
        model[0].weight.zero_()
        if model.other.is_sparse:
            model.other.mul_(7)
        model.other = torch.ones(1)
    assert model.other is other
    assert before is None or torch.equal(model.other.to_dense(), before)
    assert model[0].weight.any()


def test_a_sparse_buffer_can_be_edited():
    model = mlp()
    model.register_buffer("links", torch.eye(3).to_sparse())
    with hl.edit(model, "links", lambda links: links * 2):
        assert torch.equal(model.links.to_dense(), 2 * torch.eye(3))
    assert torch.equal(model.links.to_dense(), torch.eye(3))


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support:UserWarning")
@pytest.mark.parametrize("name", ["to_sparse_csr", "to_sparse_csc"])
def test_an_edit_of_a_layout_that_torch_cannot_swap_is_refused(name):
    model = mlp()
    model.register_buffer("links", getattr(torch.eye(3), name)())
    with pytest.raises(hl.NotHookable, match=r"It is kept as torch.sparse_cs.*preserve"):
        hl.edit(model, "links", hl.scale(2.0)).__enter__()
    with hl.preserve(model, "links"):
        model.links.values().mul_(2)
        assert torch.equal(model.links.to_dense(), 2 * torch.eye(3))
    assert torch.equal(model.links.to_dense(), torch.eye(3))


class Wrapping(torch.Tensor):
    """A tensor that holds another and computes with it, as those of quantised weights do."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        held = tree_map(lambda arg: getattr(arg, "held", arg), (args, kwargs or {}))
        made = func(*held[0], **held[1])
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return Wrapping(made) if made.shape == args[0].shape else made


def test_an_edit_of_a_parameter_that_wraps_another_tensor_is_refused():
    model = nn.Linear(3, 3, bias=False)
    model.weight = nn.Parameter(Wrapping(torch.eye(3)), requires_grad=False)
    with pytest.raises(hl.NotHookable, match=r"It is kept in a Wrapping, which torch cannot swap"):
        hl.edit(model, "weight", hl.scale(2.0)).__enter__()
    with hl.preserve(model):
        model.weight.held.mul_(2)
    assert torch.equal(model.weight.held, torch.eye(3))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_preserve_takes_a_scripted_model():
    model = torch.jit.script(mlp())
    before = state_bits(model)
    with hl.preserve(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3)
    assert_same_state(model, before)


def test_preserve_refuses_what_it_would_not_put_back():
    model = mlp()
    for where in ("0.weight:grad", "0:input", "0[0]"):
        with pytest.raises(hl.PlaceError, match="no module or parameter"):
            with hl.preserve(model, where):
                pass


def test_preserve_keeps_sharing():
    model = TiedLayers()
    before = state_bits(model)
    with hl.preserve(model):
        model.decode.weight = nn.Parameter(torch.zeros(3, 3))
        with torch.no_grad():
            model.encode.weight.fill_(2)
    assert model.decode.weight is model.encode.weight
    assert_same_state(model, before)


def test_preserve_survives_exceptions_and_can_be_nested_and_reused():
    model = mlp()
    before = state_bits(model)
    context = hl.preserve(model)

    def act():
        with context, torch.no_grad():
            model[0].weight.fill_(1)
            with hl.preserve(model, "0.weight"):
                model[0].weight.fill_(2)
            assert (model[0].weight == 1).all()
            raise ValueError("mine")

    for _ in range(2):
        with pytest.raises(ValueError, match="mine"):
            act()
        assert_same_state(model, before)


def test_preserve_leaves_grad_and_memory_where_they_are():
    model = mlp()
    pointers = {name: p.data_ptr() for name, p in model.named_parameters()}
    with hl.preserve(model):
        model(X).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert model[0].weight.grad is not None
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == pointers


def test_preserve_of_an_untouched_model_leaves_graphs_usable():
    model = mlp()
    loss = model(X).sum()
    with hl.preserve(model):
        model(X)
    loss.backward()
    assert model[0].weight.grad is not None


def test_preserve_inside_an_edit_and_an_edit_inside_preserve():
    model = mlp()
    before = state_bits(model)
    with hl.edit(model, "0.weight", hl.zero()):
        with hl.preserve(model), torch.no_grad():
            model[0].weight.fill_(3)
        assert not model[0].weight.any()
    assert_same_state(model, before)
    with hl.preserve(model):
        with hl.edit(model, "0.weight", hl.zero()), torch.no_grad():
            model[0].bias.fill_(3)
    assert_same_state(model, before)


def test_preserve_of_load_state_dict_with_assign():
    model = mlp()
    before, weight = state_bits(model), model[0].weight
    with hl.preserve(model):
        model.load_state_dict(
            {name: torch.zeros_like(t) for name, t in model.state_dict().items()}, assign=True
        )
    assert model[0].weight is weight
    assert_same_state(model, before)


# -- graphs and memory ----------------------------------------------------------------------------


class Expanded(nn.Module):
    """A model with buffers whose elements lie in memory once."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("gain", torch.tensor([2.0]).expand(2))
        self.register_buffer("none", torch.zeros(1, 0).expand(4, 0))

    def forward(self, x):
        return self.linear(x) * self.gain


@pytest.mark.parametrize("change", ["nothing", "memory", "another"])
def test_expanded_buffers_are_preserved_with_all_the_rest(change):
    model = Expanded()
    gain, weight = model.gain, model.linear.weight.detach().clone()
    with hl.preserve(model), torch.no_grad():
        model.linear.weight.zero_()
        if change == "memory":
            model.gain[:1].fill_(7)
        elif change == "another":
            model.gain = torch.zeros(2)
    assert torch.equal(model.linear.weight, weight)
    assert model.gain is gain
    hl.summarize(model, X)
    assert (gain.tolist(), gain.stride()) == ([2, 2], (0,))
    assert gain.untyped_storage().nbytes() == 4
    assert_clean(model)


@pytest.mark.parametrize("verb", ["preserve", "summarize"])
def test_a_graph_that_saved_running_statistics_stays_valid_when_they_are_put_back(verb):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    other = copy.deepcopy(model)
    (other(X) ** 3).sum().backward()
    result = model(X)
    before = state_bits(model)
    if verb == "summarize":
        hl.summarize(model, X, mode="train")
    else:
        with hl.preserve(model):
            model(X * 2)
    assert_same_state(model, before)
    (result**3).sum().backward()
    assert torch.equal(model[0].weight.grad, other[0].weight.grad)


def test_a_graph_that_saved_what_was_written_inside_preserve_is_refused_afterwards():
    model = nn.BatchNorm1d(3).eval()
    with hl.preserve(model):
        model.running_var.fill_(4)
        result = model(X)
    with pytest.raises(RuntimeError, match="inplace operation"):
        result.sum().backward()


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
    ids=["sparse rows", "nested"],
)
def test_preserve_puts_back_buffers_that_have_no_strides(make):
    model = mlp()
    model.register_buffer("other", make())
    other, weight = model.other, model[0].weight.detach().clone()
    with hl.preserve(model), torch.no_grad():
        model[0].weight.zero_()
        model.other.zero_()
    assert model.other is other
    assert str(other) == str(make())
    assert torch.equal(model[0].weight, weight)


def test_a_graph_that_saved_running_statistics_inside_preserve_is_refused_afterwards():
    model, x = nn.BatchNorm1d(3), X.clone().requires_grad_()
    with hl.preserve(model):
        model(5 * X)
        result = model.eval()(x)
    with pytest.raises(RuntimeError, match="inplace operation"):
        result.sum().backward()


def test_preserve_fills_freed_memory_that_several_buffers_share():
    model, memory = nn.Module(), torch.arange(10.0)
    model.register_buffer("late", memory[6:9])
    model.register_buffer("early", memory[:3])
    with hl.preserve(model):
        memory.untyped_storage().resize_(0)
    assert model.late.tolist() == [6, 7, 8]
    assert model.early.tolist() == [0, 1, 2]
    assert memory.untyped_storage().nbytes() == 40


def test_an_attached_preservation_outlives_calls_though_nobody_holds_it():
    model = nn.Sequential(nn.Linear(2, 2))
    before = model[0].weight.detach().clone()
    hl.preserve(model).attach()
    for _ in range(2):
        model(torch.ones(1, 2))
        gc.collect()
    (handle,) = hl.attached(model)
    with torch.no_grad():
        model[0].weight.zero_()
    handle.remove()
    assert torch.equal(model[0].weight, before)
