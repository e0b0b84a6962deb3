"""FLOPs that summarize does not count, for they follow from shapes: torch's counter is the oracle.

Every case is summarised with shortcuts and without, and compared with torch's counter, module by
module.
"""

import copy
import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import hookline as hl
from hookline.costs import flop_formulas
from hookline.costs.call_tree import CallTree
from hookline.costs.flop_counter import FlopCounter

aten = torch.ops.aten


class Run(nn.Module):
    """Runs a function of its layers and of its arguments."""

    def __init__(self, function, *layers):
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, *args):
        return self.function(*self.layers, *args)


def attention_flops(q, k, v, *args, out_shape=None, **kwargs):
    return 2 * q[:-1].numel() * k[-2] * (q[-1] + v[-1])


def bilinear_flops(one, weight, two, *args, out_shape=None, **kwargs):
    return 2 * one[0] * weight[0] * weight[2] * (weight[1] + 1)


def forward_flops_by_torch(model, batch):
    """What torch's counter finds by module; it lacks two formulas."""
    more = {
        aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
        aten._trilinear: bilinear_flops,
    }
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=more) as counter:
        model(*batch)
    root = type(model).__name__
    found = {name: sum(by.values()) for name, by in counter.get_flop_counts().items()}
    return {
        name.removeprefix(root).removeprefix("."): flops
        for name, flops in found.items()
        if name.startswith(root)
    }


def assert_counts_as_torch_does(model, *batch, zero=False, whole=False):
    expected = forward_flops_by_torch(model, batch)
    summary = hl.summarize(model, lambda m: m(*batch))
    assert summary.totals["flops"] == expected.get("", 0)
    assert bool(expected.get("", 0)) != zero
    for row in () if whole else summary:
        assert row.flops == expected.get(row.place, 0), row.place
    with pytest.MonkeyPatch.context() as patch:  # and the same without shortcuts, of all that it is
        patch.setattr("hookline.costs.flop_counter.without_dispatch_modes", None)
        counted = hl.summarize(model, lambda m: m(*batch)).to_dict()
    assert summary.to_dict() == counted
    return summary


def sparse(tensor):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is in beta
        return tensor.to_sparse()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@torch.jit.ignore
def unseen(x, w):
    """A product that no function mode sees, as in an extension that is written in C++."""
    with torch._C.DisableTorchFunction():
        return x @ w


def tried_product(bad, x):
    try:
        return bad(x)
    except RuntimeError:
        return x @ x.new_ones(x.shape[-1], 2)  # right after it, with no module in between


def autocast(layer, x):
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x)


def inside_vmap(layer, x):
    return layer(torch.vmap(layer)(x))  # the shape that it shows is that of one sample


X2, X3, X4 = torch.randn(5, 4), torch.randn(2, 5, 4), torch.randn(2, 3, 5, 4)
IMAGE = torch.randn(2, 4, 8, 8)

LAYERS = {
    "linear": (nn.Linear(4, 6), X2),
    "linear 3-D": (nn.Linear(4, 6), X3),
    "linear 4-D, no bias": (nn.Linear(4, 6, bias=False), X4),
    "linear, not contiguous": (nn.Linear(5, 6), X3.transpose(1, 2)),
    "linear, empty": (nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), X2[:0]),
    "conv1d": (nn.Conv1d(5, 6, 3), X3),
    "conv2d": (nn.Conv2d(4, 6, 3, 2, 1), IMAGE),
    "conv2d, groups": (nn.Conv2d(4, 8, 3, groups=2, dilation=2), IMAGE),
    "conv2d, depthwise": (nn.Conv2d(4, 4, 3, groups=4), IMAGE),
    "conv3d": (nn.Conv3d(4, 2, 3), torch.randn(1, 4, 5, 5, 5)),
    "conv2d, transposed": (nn.ConvTranspose2d(4, 3, 2, 2), IMAGE),
    "conv2d, one image": (nn.Conv2d(4, 6, 3), IMAGE[0]),
    "bilinear": (Run(lambda b, x: b(x, x), nn.Bilinear(4, 4, 3)), X2),
    "gru": (nn.GRU(4, 6, 2), X3),
    "rnn cell": (nn.RNNCell(4, 6), X2),
    "bfloat16": (nn.Linear(4, 6).bfloat16(), X3.bfloat16()),
    "double": (nn.Linear(4, 6).double(), X3.double()),
    "meta": (nn.Linear(4, 6, device="meta"), X3.to("meta")),
    "autocast": (Run(autocast, nn.Linear(4, 6)), X3),
    "encoder layer": (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), X3),
    "attention, weights": (
        Run(lambda a, x: a(x, x, x)[0], nn.MultiheadAttention(4, 2, batch_first=True)),
        X3,
    ),
    "attention, no weights": (
        Run(lambda a, x: a(x, x, x, need_weights=False)[0], nn.MultiheadAttention(4, 2)),
        X3,
    ),
    "twice the same": (Run(lambda a, x: a(a(x)), nn.Linear(4, 4)), X3),
    "within vmap": (Run(inside_vmap, nn.Linear(4, 4)), X3),
    "custom function": (Run(lambda a, x: Double.apply(a(x), x.mT @ x), nn.Linear(4, 4)), X3),
    "checkpoint": (Run(lambda a, x: checkpoint(a, x, use_reentrant=False), nn.Linear(4, 4)), X3),
    "an extension": (Run(lambda a, x: unseen(a(x), x.mT), nn.Linear(4, 4)), X3),
    "caught": (Run(tried_product, nn.Linear(5, 5)), X3),
    "caught further up": (Run(tried_product, nn.Sequential(nn.ReLU(), nn.Linear(5, 5))), X3),
    "weights by keyword": (Run(lambda a, x: a(input=x), nn.Linear(4, 4)), X3),
    "a functional call": (Run(lambda a, x: F.linear(a(x), a.weight), nn.Linear(4, 4)), X3),
    "direct forward": (Run(lambda a, x: a.forward(x), nn.Linear(4, 4)), X3),
    "einsum": (Run(lambda x: torch.einsum("bij,bkj->bik", x, x)), X3),
    "matmul": (Run(lambda x: torch.matmul(x, x.mT) @ x), X3),
    "matmul, within vmap": (Run(lambda x: x[0] @ x[0].mT + torch.vmap(lambda a: a @ a.mT)(x)), X3),
    "bmm": (Run(lambda x: torch.bmm(x, x.mT) + x.bmm(x.mT)), X3),
    "baddbmm": (Run(lambda x: torch.baddbmm(x, x.bmm(x.mT), x)), X3),
    "addmm": (Run(lambda x: torch.addmm(x, x.mm(x.T), x)), X2),
    "chain": (Run(lambda x: torch.linalg.multi_dot([x, x.T, x])), X2),
    "cdist": (Run(lambda x: torch.cdist(x, x, compute_mode="use_mm_for_euclid_dist")), X3),
    "weight norm": (nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), X3),
    "orthogonal": (nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), X3),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_each_kind_of_layer_counts_as_torch_does(name):
    model, x = LAYERS[name]
    # torch has no formula for some, and takes a module that raised for one that is still running.
    zero = name in ("linear, empty", "cdist")
    assert_counts_as_torch_does(model, x, zero=zero, whole="caught" in name)


def test_a_vector_and_a_matrix_count_as_torch_counts_them():
    assert_counts_as_torch_does(nn.Linear(4, 6), X2[0])
    assert_counts_as_torch_does(nn.Linear(4, 6, bias=False), X2[0])
    assert_counts_as_torch_does(Run(F.linear), X2[0], X2)
    assert_counts_as_torch_does(Run(F.linear), X2, X2[0], zero=True)


@pytest.mark.parametrize("options", [
    {}, {"is_causal": True}, {"scale": 0.5}, {"dropout_p": 0.5}, {"attn_mask": torch.zeros(7, 5)},
])  # fmt: skip
@pytest.mark.parametrize("shape", [(7, 4), (2, 7, 4), (2, 3, 7, 4), (2, 1, 3, 7, 4)])
@pytest.mark.parametrize("fast", [False, True])
def test_attention_counts_as_torch_does(options, shape, fast):
    q, k = torch.randn(shape), torch.randn(*shape[:-2], 5, 4)
    k = q if options.get("is_causal") else k
    model = Run(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION] * fast + [SDPBackend.MATH]):
        assert_counts_as_torch_does(model, q, k, k)


def test_attention_with_other_widths_groups_and_broadcast_counts_as_torch_does():
    attend = F.scaled_dot_product_attention
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 4, 5, 3)
    assert_counts_as_torch_does(Run(attend), q, q, v)
    assert_counts_as_torch_does(Run(lambda q, k: attend(q, k, k, enable_gqa=True)), q, k)
    assert_counts_as_torch_does(Run(attend), q[:1], q[:, :1], q[:, :1])
    assert_counts_as_torch_does(Run(lambda q: attend(query=q, key=q, value=q)), q)


def test_free_modules_and_functions_have_no_flops():
    made = {
        nn.Embedding: (nn.Embedding(4, 4, max_norm=1.0), torch.tensor([[1, 2]])),
        nn.LayerNorm: (nn.LayerNorm(4), X3), nn.GroupNorm: (nn.GroupNorm(2, 4), IMAGE),
        nn.BatchNorm1d: (nn.BatchNorm1d(5), X3), nn.BatchNorm2d: (nn.BatchNorm2d(4), IMAGE),
        nn.BatchNorm3d: (nn.BatchNorm3d(4), torch.randn(2, 4, 3, 3, 3)),
        nn.Softmax: (nn.Softmax(-1), X3), nn.MaxPool2d: (nn.MaxPool2d(2), IMAGE),
        nn.AvgPool2d: (nn.AvgPool2d(2), IMAGE),
        nn.AdaptiveAvgPool2d: (nn.AdaptiveAvgPool2d(2), IMAGE),
    }  # fmt: skip
    for kind in flop_formulas._FREE:
        module, x = made.get(kind) or (kind(), X3)
        assert_counts_as_torch_does(module, x, zero=True)
    assert_counts_as_torch_does(nn.MaxPool2d(2, return_indices=True), IMAGE, zero=True)
    more = {
        F.layer_norm: ((4,),), F.embedding: (torch.randn(9, 2),), F.group_norm: (5,),
        F.softmax: (-1,), torch.softmax: (-1,), torch.Tensor.softmax: (-1,),
        torch.Tensor.view: (-1,), torch.Tensor.reshape: (-1,), torch.Tensor.transpose: (0, 1),
        torch.Tensor.permute: (2, 0, 1), torch.Tensor.unflatten: (-1, (2, 2)),
        torch.Tensor.chunk: (2,), torch.Tensor.split: (1,), torch.Tensor.unsqueeze: (0,),
        torch.Tensor.expand: (2, 5, 4), torch.Tensor.expand_as: (X3,),
    }  # fmt: skip
    binary = {"add", "__add__", "__radd__", "__iadd__", "mul", "__mul__", "__rmul__", "sub",
              "__sub__", "__truediv__"}  # fmt: skip
    for function in flop_formulas.FREE:
        x = torch.ones(2, 3, dtype=torch.long) if function is F.embedding else X3.clone()
        args = (2.0,) if function.__name__ in binary else more.get(function, ())
        model = Run(lambda x, f=function, a=args: f(x, *a))
        assert_counts_as_torch_does(model, x, zero=True)


def test_free_modules_and_functions_are_made_of_operations_that_are_known_to_be_free(monkeypatch):
    class Listing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(func._overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    def look(model, x, zero):
        for training in (True, False):
            for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                with mode(), Listing():
                    model.train(training)(x.clone())

    seen = set()
    monkeypatch.setitem(globals(), "assert_counts_as_torch_does", look)
    test_free_modules_and_functions_have_no_flops()
    assert seen <= flop_formulas._FREE_OPERATIONS


def test_leaves_have_one_argument():
    # So their hooks need not be told of arguments by name if one was given by position.
    for kind in flop_formulas._LEAVES:
        assert len(inspect.signature(kind.forward).parameters) == 2, kind


def test_a_leaf_whose_argument_is_given_by_name_is_told_as_any_other():
    model = Run(lambda a, b, x: b(input=a(input=x)), nn.Linear(4, 6), nn.ReLU())
    summary = assert_counts_as_torch_does(model, X3)
    assert summary["layers.0"].inputs == {"input": "(2, 5, 4)"}
    assert summary["layers.1"].inputs == {"input": "(2, 5, 6)"}


def test_arguments_by_name_leave_a_free_function_free():
    model = Run(lambda x: F.softmax(x, dim=-1) + F.layer_norm(x, (4,), eps=0.1) + x.sum(dim=0))
    assert_counts_as_torch_does(model, X3, zero=True)


def test_calls_after_one_that_raised_have_the_right_parent():
    def fail(x):
        raise KeyError("on purpose")

    def try_first(bad, good, x):
        try:
            return bad(x)
        except KeyError:
            return good(good(x))

    bad, good = nn.Sequential(nn.Linear(4, 4), Run(fail)), nn.Linear(4, 4)
    model = Run(try_first, bad, nn.Sequential(good))
    summary = assert_counts_as_torch_does(model, X3, whole=True)
    one = 2 * 10 * 4 * 4
    places = ("", "layers.0", "layers.0.0", "layers.1", "layers.1.0")
    assert [summary[place].flops for place in places] == [3 * one, one, one, 2 * one, 2 * one]
    assert summary["layers.0"].output is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_and_functions_are_counted():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model = Run(lambda a, b, x: b(a(x)), nn.Linear(4, 4), scripted)
    found = hl.summarize(model, X3)
    assert found.totals["flops"] == forward_flops_by_torch(model, (X3,))[""] == 2 * (2 * 10 * 4 * 4)

    def product(x: torch.Tensor) -> torch.Tensor:
        return x @ x.mT

    function = torch.jit.script(product)
    model = Run(lambda a, x: function(a(x)), nn.Linear(4, 4))
    assert hl.summarize(model, X3).totals["flops"] == forward_flops_by_torch(model, (X3,))[""]


def test_weights_and_arguments_that_are_not_dense_are_left_to_the_dispatcher():
    class Tagged(torch.Tensor):
        """A subclass without behaviour of its own."""

    model = nn.Linear(4, 6)
    model.weight = nn.Parameter(torch.Tensor._make_subclass(Tagged, model.weight.detach()))
    assert_counts_as_torch_does(model, X2)
    model = nn.Linear(4, 6)
    assert_counts_as_torch_does(model, X2.as_subclass(Tagged))
    nested = torch.nested.nested_tensor([X2, X2[:2]], layout=torch.jagged)
    assert_counts_as_torch_does(nn.Sequential(nn.ReLU(), nn.Identity()), sparse(X2), zero=True)
    assert not flop_formulas.is_ordinary([sparse(X2)])
    assert not flop_formulas.is_ordinary([nested])
    assert flop_formulas.flops_of_call(F.linear, (sparse(X2), X2)) is None
    assert not flop_formulas.is_own((type(nested),))


def test_what_others_hooks_and_forwards_compute_is_counted():
    def again(module, args, output):
        return output @ output.mT

    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(again)
    assert_counts_as_torch_does(Run(lambda a, x: a(x), hooked), X3, whole=True)
    handle = nn.modules.module.register_module_forward_hook(again)
    try:
        expected = forward_flops_by_torch(nn.Linear(4, 4), (X3,))[""]
        assert hl.summarize(nn.Linear(4, 4), X3).totals["flops"] == expected
    finally:
        handle.remove()
    replaced = nn.ReLU()
    replaced.forward = lambda x: x @ x.mT
    assert_counts_as_torch_does(Run(lambda a, x: a(x), replaced), X3)


def test_a_forward_that_was_replaced_for_a_whole_class_is_counted(monkeypatch):
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight.T @ self.weight)
    assert_counts_as_torch_does(Run(lambda layer, x: layer(x), nn.Linear(4, 6)), torch.zeros(5, 4))


def test_a_call_that_raises_leaves_the_modes_as_they_were():
    model = Run(tried_product, nn.Linear(5, 5))
    tree = CallTree(model, certain=True)
    with torch.no_grad(), FlopCounter(tree.count), tree:
        model(X3)
        assert tree.doubtful  # so it is run again, and counted all the way
        assert torch._C._is_torch_function_enabled()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        hl.summarize(nn.Sequential(nn.Linear(5, 5)), X3)
    assert torch._C._is_torch_function_enabled()
    assert not torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()


def test_a_backward_through_what_was_not_counted_is_counted():
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    totals = hl.summarize(model, X3, backward=True).totals
    with FlopCounterMode(display=False) as counter:
        model(X3).sum().backward()
    assert totals["flops"] + totals["backward_flops"] == counter.get_total_flops()


def test_formulas_that_torch_does_not_bring_turn_the_shortcuts_off(monkeypatch):
    from torch.utils import flop_counter

    assert flop_formulas.has_torchs_formulas()
    known = flop_counter.flop_registry
    monkeypatch.setitem(known, aten.addmm, lambda *args, **kwargs: 7)
    assert not flop_formulas.has_torchs_formulas()
    assert hl.summarize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), X2).totals["flops"] == 14
    monkeypatch.undo()
    monkeypatch.setitem(known, aten.native_layer_norm, flop_counter.mm_flop)
    assert not flop_formulas.has_torchs_formulas()
    monkeypatch.undo()
    assert flop_formulas.has_torchs_formulas()


def test_formulas_for_operations_that_are_new_in_torch_leave_the_shortcuts_on(monkeypatch):
    from torch.utils import flop_counter

    known = flop_counter.flop_registry
    model = Run(lambda a, x: F.scaled_dot_product_attention(a(x), x, x), nn.Linear(4, 4))
    before = hl.summarize(model, X4).to_dict()
    added = {  # torch 2.15 has the first two
        aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            aten._scaled_dot_product_flash_attention_backward
        ),
        aten.dot: aten.mm,
    }
    for operation, same in added.items():
        monkeypatch.setitem(known, operation, known[same])
    assert FlopCounter(lambda flops: None).certain
    assert hl.summarize(model, X4).to_dict() == before


def test_a_formula_for_an_operation_of_another_library_leaves_the_shortcuts_on(monkeypatch):
    from torch.utils import flop_counter

    @torch.library.custom_op("hookline_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x + x

    formula = torch.ops.hookline_tests.twice, lambda *args, **kwargs: 7
    monkeypatch.setitem(flop_counter.flop_registry, *formula)
    assert FlopCounter(lambda flops: None).certain
    model = Run(lambda a, x: F.relu(twice(a(x))), nn.Linear(4, 4))
    assert hl.summarize(model, X2).totals["flops"] == 2 * 5 * 4 * 4 + 7


def test_the_users_own_function_modes_still_see_everything():
    class Listing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in (F.linear, F.layer_norm):
                seen.append(func)
            return func(*args, **(kwargs or {}))

    model, seen = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), []
    with Listing():
        assert hl.summarize(model, X2).totals["flops"] == 2 * (2 * 5 * 4 * 4)
    assert seen == [F.linear, F.layer_norm, F.linear]
    with torch.device("cpu"):  # a function mode as well
        assert FlopCounter(lambda flops: None).certain


def test_the_users_own_dispatch_modes_still_see_everything():
    class Listing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    model, seen = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), []
    with Listing():
        hl.summarize(model, X2)
    assert seen.count(aten.addmm.default) == 2
    assert seen.count(aten.native_layer_norm.default) == 1


def test_a_shallow_copy_that_the_model_calls_is_no_module_of_it():
    model = Run(lambda a, x: copy.copy(a)(a(x)), nn.Linear(4, 4))
    summary = hl.summarize(model, X3)
    one = 2 * 10 * 4 * 4
    assert summary["layers.0"].calls == 1
    assert (summary["layers.0"].flops, summary[""].own_flops) == (one, one)


PARTS = [
    lambda width: nn.Linear(width, width),
    lambda width: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width, bias=False),
                                nn.GELU(), nn.Linear(2 * width, width)),
    lambda width: Run(lambda a, x: F.linear(a(x), a.weight) + x, nn.Linear(width, width)),
    lambda width: Run(lambda a, x: F.scaled_dot_product_attention(a(x), x, x),
                      nn.Linear(width, width)),
    lambda width: Run(lambda x: (x @ x.mT).softmax(-1) @ x),
    lambda width: Run(lambda x: torch.einsum("...ij,...kj->...ik", x, x).mean(-1, True) * x),
    lambda width: Run(lambda a, x: torch.vmap(a)(x), nn.Linear(width, width)),
    lambda width: Run(lambda a, x: tried_product(a, x) + a(x.repeat(*[1] * (x.ndim - 1), 2)).sum(),
                      nn.Linear(2 * width, 2)),
    lambda width: nn.utils.parametrizations.weight_norm(nn.Linear(width, width)),
    lambda width: nn.Dropout(0.5),
]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(st.integers(0, len(PARTS) - 1), min_size=1, max_size=5),
    width=st.integers(1, 3),
    shape=st.lists(st.integers(1, 3), min_size=2, max_size=3),
)
def test_random_models_count_as_torch_does(parts, width, shape):
    # The parts that catch an error narrow their output to two: they come last.
    layers = [PARTS[n](2 * width) for n in sorted(parts, key=lambda n: n == 7)]
    layers = layers[: len(parts) - max(parts.count(7) - 1, 0)]
    x = torch.randn(*shape, 2 * width)
    zero = not any(forward_flops_by_torch(nn.Sequential(*layers), (x,)).values())
    assert_counts_as_torch_does(nn.Sequential(*layers), x, zero=zero, whole=7 in parts)
