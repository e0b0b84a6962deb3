"""Small experiments that find out what a library does: the feature table comes from these.

Each probe takes a library and returns a verdict with a reason. An error that the library raises is
no silence: where the right value cannot be had, telling so is better than a wrong value.

- `yes` it does
- `no` it does not, and says so, or keeps less than was asked in a way that shows
- `silent` it gives a wrong value, or does nothing, without a word
- `absent` it does not offer this
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from types import ModuleType

import torch

from peers import models, raw
from peers.awkward import (
    Counting,
    Failing,
    Failure,
    InPlace,
    Keyword,
    Meddled,
    Recurrent,
    Thrice,
)
from peers.witnesses import flat, hooks_on, state_of, tidy

Verdict = tuple[str, str]
PROBES: dict[str, Callable[[ModuleType], Verdict]] = {}


class Absent(Exception):
    pass


def probe(title: str):
    def register(function):
        PROBES[title] = function
        return function

    return register


def verb(peer: ModuleType, *names: str):
    """The first of these functions that the library has."""
    for name in names:
        if hasattr(peer, name):
            return getattr(peer, name)
    raise Absent(peer.ABSENT.get(names[0], "none"))


def said(error: BaseException) -> str:
    """The kind of an error and the beginning of what it says."""
    lines = str(error).strip().splitlines() or [""]
    text = lines[-1].strip() if "Traceback" in lines[0] else lines[0].strip()
    return f"{type(error).__name__}: {text[:110]}"


def home(peer: ModuleType):
    """A model that the library can take, a batch, and two places in it."""
    if getattr(peer, "HOME", "") == "gpt2":
        model, ids = models.gpt2()
        return model, ids, ["transformer.h.0", "transformer.h.11"]
    return models.Residual(), torch.randn(3, 4), ["first", "last"]


def logits(output):
    return getattr(output, "logits", output)


# What is kept.


@probe("values and outputs are bit-identical to the bare model's")
def identical(peer):
    capture = verb(peer, "capture")
    model, x, names = home(peer)
    expected, output = raw.capture(model, names)(x), logits(model(x))
    found = capture(model, names)(x)
    if not all(torch.equal(found[name], expected[name]) for name in names):
        worst = max((found[n] - expected[n]).abs().max().item() for n in names)
        return "no", f"they differ by up to {worst:.0e}"
    seen = getattr(model, "seen", output)
    return ("yes", "") if torch.equal(seen, output) else ("silent", "the output is another")


def kept(peer, with_gradients):
    model, x = InPlace().eval(), torch.randn(3, 4)
    with torch.set_grad_enabled(with_gradients):
        expected = model.first(x).detach().clone()
        run = verb(peer, "capture")(model, ["first"])
        try:
            found = run(x)["first"]
        except Exception as error:
            return "yes", f"by an error on reading: {said(error)}"
    if torch.equal(found, expected):
        return "yes", ""
    return "silent", "the value is what the in-place operation left"


@probe("a value stays as it was when a later operation is in-place")
def kept_without_gradients(peer):
    return kept(peer, with_gradients=False)


@probe("… with gradients on, or reading it is an error")
def kept_with_gradients(peer):
    return kept(peer, with_gradients=True)


@probe("a captured value can be used in a loss")
def usable_in_a_loss(peer):
    run = verb(peer, "attached", "capture")
    model, x, names = home(peer)
    attached = hasattr(peer, "attached")
    found = run(model, names[0] if attached else names[:1])(x)[names[0]]
    if not found.requires_grad:
        return "no", "it is detached"
    weight = next(p for p in model.parameters() if p.requires_grad)
    if hasattr(peer, "HOME"):
        found.square().sum().backward()
        return "yes", ""
    (gradient,) = torch.autograd.grad(found.square().sum(), weight)
    (expected,) = torch.autograd.grad(model.first(x).square().sum(), weight)
    return ("yes", "") if torch.allclose(gradient, expected) else ("silent", "wrong gradient")


@probe("nested outputs (an LSTM's) are kept whole")
def nested(peer):
    model, x = Recurrent(), torch.randn(2, 5, 4)
    y, (h, c) = model.lstm(x)
    if hasattr(peer, "nested"):
        found = flat(peer.nested(model, "lstm")(x)["lstm"])
    else:
        found = flat(verb(peer, "capture")(model, ["lstm"])(x)["lstm"])
    if len(found) < 3:
        shapes = ", ".join(str(tuple(value.shape)) for value in found)
        return "silent", f"of the output, hidden and cell state it gives {len(found)}: {shapes}"
    right = all(map(torch.equal, found, (y, h, c)))
    return ("yes", "") if right else ("silent", "values differ")


@probe("every call of a module that is called three times")
def repeated(peer):
    model, x = Thrice(), torch.randn(2, 4)
    expected = raw.calls(model, ["layer"])(x)["layer"]
    if hasattr(peer, "calls"):
        found = peer.calls(model, ["layer"])(x)["layer"]
    else:
        found = [verb(peer, "capture")(model, ["layer"])(x)["layer"]]
        if isinstance(found[0], (list, tuple)):
            found = list(found[0])
    if len(found) == 3 and all(map(torch.equal, found, expected)):
        return "yes", ""
    if len(found) == 1:
        which = [i for i, value in enumerate(expected) if torch.equal(value, found[0])]
        return "silent", f"one value, of call {which[0] + 1 if which else '?'}"
    return "silent", f"{len(found)} values"


@probe("every step of generate()")
def steps(peer):
    generate = verb(peer, "generate")
    model, ids = models.gpt2()
    name = "transformer.h.3"
    with torch.no_grad():
        expected = raw.generate(model, [name], 4)(ids)[name]
        found = generate(model, [name], 4)(ids)[name]
    right = len(found) == 4 and all(
        a.shape == b.shape and torch.allclose(a, b, atol=1e-5)
        for a, b in zip(found, expected, strict=True)
    )
    return ("yes", "") if right else ("silent", f"{len(found)} values, or other ones")


@probe("the input of a layer that gets it by keyword")
def keyword_input(peer):
    model, x = Keyword(), torch.randn(2, 4)
    found = verb(peer, "inputs")(model, "inner", "x")(x)
    right = isinstance(found, torch.Tensor) and torch.equal(found, x * 2)
    return ("yes", "") if right else ("silent", f"it gives {str(found)[:40]}")


@probe("a torch function inside a forward (tanh)")
def inside(peer):
    model, x = models.Residual(), torch.randn(2, 4)
    found = verb(peer, "operation")(model, "", "tanh")(x)
    right = torch.equal(found, torch.tanh(model.first(x)))
    return ("yes", "") if right else ("silent", "another value")


@probe("only the calls of one's own thread")
def own_thread(peer):
    model, x = Meddled(), torch.randn(2, 4)
    with torch.no_grad():
        expected = model.layer(x)
        if hasattr(peer, "calls"):
            found = peer.calls(model, ["layer"])(x)["layer"]
        else:
            found = [verb(peer, "capture")(model, ["layer"])(x)["layer"]]
    if len(found) == 1:
        right = torch.equal(found[0], expected)
        return ("yes", "") if right else ("silent", "one value, of the other thread")
    return "no", "the other thread's calls are among its own"


@probe("a model compiled before")
def compiled(peer):
    capture = verb(peer, "capture")
    model, x = models.Residual(), torch.randn(2, 4)
    expected = model.first(x).detach()
    fast = torch.compile(model, backend="eager")
    fast.width = model.width
    for with_gradients in (True, False):  # else a library that turns them off has it compiled anew
        with torch.set_grad_enabled(with_gradients):
            fast(x)
    try:
        run, name = capture(fast, ["first"]), "first"
    except (LookupError, AttributeError, ValueError):
        name = "_orig_mod.first"
        run = capture(fast, [name])
    try:
        found = run(x)[name]
    except LookupError:
        name = "_orig_mod.first"
        found = capture(fast, [name])(x)[name]
    return ("yes", "") if torch.equal(found, expected) else ("silent", "another value")


# What is told.


def told(peer, name):
    capture = verb(peer, "capture")
    model, x, _ = home(peer)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            found = capture(model, [name])(x)
        except NotImplementedError:
            raise
        except Exception as error:
            return "yes", said(error)
    if heard:
        return "yes", f"a warning: {str(heard[0].message)[:80]}"
    return "silent", f"no error; it gives {str(found)[:60]}"


@probe("a name that matches nothing is an error")
def unmatched(peer):
    return told(peer, "transformer.h.99" if hasattr(peer, "HOME") else "frist")


@probe("a layer that is never called is told")
def never_called(peer):
    if hasattr(peer, "HOME"):
        raise Absent("all its hook points are called")
    return told(peer, "unused")


# What is changed.


@probe("an edit acts, and is gone afterwards")
def edited(peer):
    model, x, names = home(peer)

    def change(value):
        return value * 0.5

    before = logits(model(x))
    expected = logits(raw.edit(model, names[0], change)(x))
    run = verb(peer, "edit")(model, names[0], change)
    found = logits(run(x))
    if not torch.allclose(found, expected, atol=1e-5):
        return "silent", "another output"
    if not torch.equal(logits(model(x)), before):
        return "silent", "the model gives other outputs afterwards"
    return "yes", ""


@probe("a parameter is edited and put back, the same object and bits")
def parameter(peer):
    model, x = models.Residual(), torch.randn(2, 4)
    weight, before = model.first.weight, model.first.weight.detach().clone()
    output = model(x).detach()
    found = verb(peer, "edit_parameter")(model, "first.weight", torch.zeros(4, 4))(x)
    if torch.equal(found, output):
        return "silent", "the edit did nothing"
    same = model.first.weight is weight and torch.equal(weight, before)
    return ("yes", "") if same else ("silent", "it is not as it was")


@probe("the gradient of a layer that an in-place ReLU follows")
def gradient_in_place(peer):
    model, x = InPlace(), torch.randn(3, 4)
    before = model.first(x)
    (expected,) = torch.autograd.grad(torch.relu(before).sum(), before)
    found = verb(peer, "gradient")(model, "first")(x)
    right = found.shape == expected.shape and torch.allclose(found, expected)
    return ("yes", "") if right else ("silent", "another gradient")


@probe("a stop: what comes after does not run")
def stopped(peer):
    stop = verb(peer, "stop")
    model, x, names = home(peer)
    if hasattr(peer, "HOME"):
        model.lm_head = Counting(models.GPT2_WIDTH, models.GPT2_WORDS, bias=False)
    else:
        model = models.Residual(last=Counting(4, 4))
    expected = raw.capture(model, names[:1])(x)[names[0]]
    run = stop(model, names[0])
    Counting.ran = 0
    found = run(x)
    if not torch.allclose(found, expected, atol=1e-5):
        return "silent", "another value"
    return ("yes", "") if not Counting.ran else ("no", "the rest of the model ran")


# What is left behind.


@probe("no hook is left when the model raises, and the error is the model's own")
def no_hook_left(peer):
    capture = verb(peer, "capture")
    if hasattr(peer, "HOME"):
        raise Absent("it works on its own modules")
    model, x = models.Residual(last=Failing()), torch.randn(2, 4)
    run = capture(model, ["first"])
    other = ""
    try:
        run(x)
    except Failure:
        pass
    except Exception as error:
        other = f"the error is another one: {said(error)}"
    else:
        other = "the error does not come out"
    tidy(run)
    del run
    gc.collect()
    left = hooks_on(model)
    if left:
        return "silent", f"{left} left, which act in later runs"
    return ("no", other) if other else ("yes", "")


@probe("the model is as it was: modules, attributes, flags, hooks")
def model_untouched(peer):
    capture = verb(peer, "capture")
    if hasattr(peer, "HOME"):
        raise Absent("it rebuilds the model; here it was given a copy")
    model, x = models.Residual(), torch.randn(2, 4)
    before = state_of(model)
    run = capture(model, ["first", "middle"])
    run(x)
    tidy(run)
    del run
    gc.collect()
    after = state_of(model)
    if hooks_on(model):
        return "silent", f"{hooks_on(model)} hooks are left"
    for name, then in before.items():
        now = after[name]
        if then[4] != now[4]:
            return "no", "requires_grad of its parameters is off"
        if then[3] != now[3]:
            return "no", f"attributes are new: {', '.join(sorted(set(now[3]) - set(then[3])))}"
        if then[2] != now[2]:
            return "no", "training became evaluation mode"
        if then[:2] != now[:2]:
            return "no", "modules were replaced"
    return "yes", ""


PROCESS = "torch is as it was: no function is wrapped or replaced afterwards"  # see worker.py
