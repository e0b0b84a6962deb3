"""What entering costs: what is asked for and the path to it, however large the model is."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed.fsdp  # some things are looked for only where it is loaded
import torch.nn.functional as F
from environment import since_the_reset
from oracles import work_of
from torch import nn

import hookline as hl
from hookline.compat.nethook import Trace, TraceDict


class ModuleTree(nn.Module):
    """So many modules, at most eight in each, that are never called."""

    def __init__(self, count):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        below = [(count - 1 + n) // 8 for n in range(8)]
        self.parts = nn.ModuleList(ModuleTree(n) for n in below if n)


class TwoOutputs(nn.Module):
    def forward(self, x):
        return x * 2, x + 1


class AttendsAndSquashes(nn.Module):
    def forward(self, x):
        heads = x.unsqueeze(1)
        return F.scaled_dot_product_attention(heads, heads, heads).squeeze(1).tanh()


class AttentionMlpPair(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp, self.pair = AttendsAndSquashes(), nn.Linear(4, 4), TwoOutputs()

    def forward(self, x):
        return self.mlp(self.attn(x)) + self.pair(x)[0]


class BlocksBehindATree(nn.Module):
    """Four blocks, behind a tree of modules, one of the blocks under a second name."""

    def __init__(self, count):
        super().__init__()
        self.tree = ModuleTree(count)
        self.h = nn.ModuleList(AttentionMlpPair() for _ in range(4))
        self.last = self.h[3]
        self.register_buffer("factor", torch.ones(4))
        self.__dict__["blocks"] = tuple(self.h)  # so that a forward looks up nothing

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x * self.factor


FEW, MANY = 10, 800


def work(use, count):
    """The work of one use of a model, when it has been used before."""
    torch.manual_seed(0)
    model, x = BlocksBehindATree(count), torch.ones(2, 3, 4, requires_grad=True)
    use(model, x)
    return work_of(lambda: use(model, x))


def forward_and_backward(model, x):
    loss = model(x).sum()
    if loss.requires_grad:  # not where a patch has put in something detached
        loss.backward()


# What each place is read by.
PLACES = {
    "h.3.mlp": "h.3.mlp",
    "last.mlp": "last.mlp",  # under its second name
    "h.*.mlp": "h.2.mlp",
    "h.{1,3}.mlp": "h.3.mlp",
    "h.3.mlp:input": "h.3.mlp:input",
    "h.3.*:inputs": "h.3.mlp:inputs",
    "h.3.pair[0]": "h.3.pair[0]",
    "h.3.mlp:grad_output": "h.3.mlp:grad_output",
    "h.3.pair:grad_output[0]": "h.3.pair:grad_output[0]",
    "h.*.mlp:grad_input": "h.1.mlp:grad_input",
    "h.3.mlp:grad_inputs": "h.3.mlp:grad_inputs",
    "h.3.mlp.weight": "h.3.mlp.weight",
    "h.*.mlp.weight:grad": "h.1.mlp.weight:grad",
    "factor": "factor",
    "h.*.attn/tanh": "h.1.attn/tanh",
    "": "",
    ":input": ":input",
}


def capturing(**options):
    def use(model, x, where):
        place = PLACES[where]
        with hl.capture(model, where, **options) as record:
            forward_and_backward(model, x)
            record[place]
        record[place], record[place, 0], record.calls(place), record.of_call(place, 0)
        assert place in record
        assert record.nbytes

    return use


def editing(change, **options):
    def use(model, x, where):
        with hl.edit(model, where, change, **options):
            forward_and_backward(model, x)

    return use


def look(value):
    """A function for `hook`."""


def hooking(model, x, where):
    with hl.hook(model, where, look):
        forward_and_backward(model, x)


def hooking_for_good(model, x, where):
    handle = hl.hook(model, where, look).attach()
    forward_and_backward(model, x)
    handle.remove()


def with_a_recipe(model, x, where):
    with hl.Recipe([(where, hl.scale(2.0)), ("h.0.mlp", hl.scale(2.0))]).on(model):
        forward_and_backward(model, x)


def patching(model, x, where):
    with hl.capture(model, where, detach=True) as record:
        forward_and_backward(model, x)
    with hl.edit(model, where, hl.patch(record)):
        forward_and_backward(model, x)
    with hl.edit(model, where, hl.patch(record, PLACES[where])):
        forward_and_backward(model, x)


USES = {
    "capture": capturing(),
    "capture of slices": capturing(at=np.s_[..., :1]),
    "capture of the last": capturing(keep="last"),
    "edit by a function": editing(lambda value: value),
    "edit": editing(hl.scale(2.0)),
    "edit of a slice": editing(hl.add(1.0), at=np.s_[..., 0]),
    "edit of some calls": editing(hl.scale(2.0) | hl.clamp(-1.0, 1.0), calls=0),
    "hook": hooking,
    "hook that is attached": hooking_for_good,
    "recipe": with_a_recipe,
    "patch": patching,
}


# What is refused: operations cannot be attached to, and a parameter has no calls.
_REFUSED = {("hook that is attached", "h.*.attn/tanh")}
_REFUSED |= {("edit of some calls", where) for where in ("h.3.mlp.weight", "factor")}


@pytest.mark.parametrize(
    ("use", "where"), [pair for pair in itertools.product(USES, PLACES) if pair not in _REFUSED]
)
def test_the_size_of_the_model_makes_no_difference(use, where):
    def at_place(model, x):
        USES[use](model, x, where)

    assert work(at_place, MANY) == work(at_place, FEW)


@pytest.mark.parametrize("where", ["{0,2}", "{0..3}:input", "{1..2}.weight"])
def test_modules_beside_those_that_braces_name_make_no_difference(where):
    def entering(count):
        model = nn.ModuleList(nn.Linear(1, 1) for _ in range(count))

        def use():
            hl.capture(model, where).attach().remove()

        use()
        return work_of(use)

    assert entering(MANY) == entering(FEW)


def attending(where, read):
    def use(model, x):
        with hl.attention(model, where) as patterns:
            model(x)
            patterns[read]
        return patterns[read, 0], patterns.calls(read)

    return use


def stopping_early(model, x):
    with hl.capture(model, "h.1.mlp", stop=True):
        model(x)


def preserving(model, x):
    with hl.preserve(model, "h.3.mlp", "h.2.mlp.weight"):
        pass


def getting(model, x):
    hl.get_module(model, "h.3"), hl.get_module(model, "last.mlp"), hl.get_module(model, "")
    hl.get_parameter(model, "h.3.mlp.weight"), hl.get_parameter(model, "factor")


def tracing(model, x):
    with Trace(model, "h.1.mlp", retain_input=True, edit_output=lambda output: output * 2) as trace:
        model(x)
    with TraceDict(model, ["h.1.mlp", "h.2.attn"]) as traces:
        model(x)
    return trace.output, traces["h.2.attn"].output


def measuring(model, x):
    hl.measure(model, ["h.3.mlp", "h.*.attn"], statistics=[hl.Mean()]).attach().remove()


VERBS = {
    "attention": attending("h.1.attn", "h.1.attn"),
    "attention at a glob": attending("h.*.attn", "h.1.attn"),
    "attention at an operation": attending(*["h.1.attn/scaled_dot_product_attention"] * 2),
    "capture that stops": stopping_early,
    "preserve": preserving,
    "get_module, get_parameter": getting,
    "measure, entered and left": measuring,
    "baukit's traces": tracing,
}


# Where torch cannot reset FSDP2, models are searched for it.
STOPPING = pytest.param("capture that stops", marks=since_the_reset)


@pytest.mark.parametrize("verb", [*sorted(VERBS.keys() - {*STOPPING.values}), STOPPING])
def test_the_size_of_the_model_makes_no_difference_to(verb):
    assert work(VERBS[verb], MANY) == work(VERBS[verb], FEW)


def test_the_size_of_the_model_makes_no_difference_to_one_more_change_of_a_sweep():
    def sweeping(*where):
        def use(model, x):
            options = {"progress": False, "batch_size": 1}  # one change a forward
            hl.sweep(model, x.detach(), x.detach() + 1, where, torch.sum, **options)

        return use

    few, more = sweeping("h.1.mlp"), sweeping("h.1.mlp", "h.2.mlp", "h.3.mlp")
    assert work(more, MANY) - work(few, MANY) == work(more, FEW) - work(few, FEW)


def test_a_patch_finds_what_a_record_has_under_either_name_of_a_module(tmp_path):
    model, x = BlocksBehindATree(2), torch.ones(2, 3, 4)
    with hl.capture(model, "last.mlp", detach=True) as record:
        model(x)
    loaded = hl.load_record(hl.save_record(record, tmp_path / "record"))
    assert loaded.places() == ["h.3.mlp"]
    for where in ("h.3.mlp", "last.mlp", [model.last.mlp], "h.*.mlp"):
        for one in (record, loaded):
            change = hl.patch(one) if where != "h.*.mlp" else hl.patch(one, "h.3.mlp")
            with hl.edit(model, where, change), hl.capture(model, "last.mlp", detach=True) as seen:
                model(x + 1)
            assert torch.equal(seen["last.mlp"], record["last.mlp"])


def test_errors_name_the_place_under_the_first_name_of_the_module():
    model, x = BlocksBehindATree(2), torch.ones(2, 3, 4)
    with pytest.raises(hl.errors.SeveralTensors, match=r"value at 'h\.3\.pair' was"):
        with hl.edit(model, "last.pair", hl.scale(2.0)):
            model(x)
    with hl.capture(model, "h.1.mlp") as record:
        model(x)
    with pytest.raises(hl.NotCaptured, match=r"a record has at 'h\.3\.mlp'"):
        hl.edit(model, "last.mlp", hl.patch(record)).attach()


def test_attention_patterns_are_found_under_either_name_of_a_module():
    model, x = BlocksBehindATree(2), torch.ones(2, 3, 4)
    with hl.attention(model, ["h.3.attn", "last.attn"]) as patterns:
        model(x)
    assert patterns.places() == ["h.3.attn"]
    assert torch.equal(patterns["last.attn"], patterns["h.3.attn"])
    with hl.attention(model, "last.attn") as patterns:
        model(x)
    assert patterns.places() == ["h.3.attn"]
    assert torch.equal(patterns["last.attn"], patterns["h.3.attn"])
