"""nnsight, as in its README: `with model.trace(...)`, `tracer.cache`, `.save()`."""

from __future__ import annotations

from nnsight import NNsight, TransformersModel

PACKAGE = "nnsight"
TITLE = "nnsight"
SOURCE = "README of 0.8.1; docstrings of tracer.cache, tracer.stop and backward.py"
NOTES = {"capture": "tracer.cache; values are detached", "setup": "wrapping the model"}
ABSENT = {
    "summary": "none", "to_disk": "none", "edit_parameter": "none for parameters",
}  # fmt: skip


def wrap(model):
    if not hasattr(model, "generate"):
        return NNsight(model)
    from peers.models import tokenizer

    return TransformersModel(model, tokenizer=tokenizer())


def cached(view, name):
    return view[f"model.{name}"].output


def capture(model, names):
    wrapped = wrap(model)
    modules = [wrapped.get(name) for name in names]

    def run(*args, **kwargs):
        with wrapped.trace(*args, **kwargs) as tracer:
            cache = tracer.cache(modules=modules)
        return {name: cached(cache, name) for name in names}

    return run


def calls(model, names):
    run = capture(model, names)

    def listed(*args, **kwargs):
        found = run(*args, **kwargs)
        return {name: one if isinstance(one, list) else [one] for name, one in found.items()}

    return listed


def inputs(model, name, keyword=None):
    wrapped = wrap(model)
    module = wrapped.get(name)

    def run(*args, **kwargs):
        with wrapped.trace(*args, **kwargs):
            value = module.input.save() if keyword is None else module.inputs[1][keyword].save()
        return value

    return run


def attached(model, name):
    wrapped = wrap(model)
    module = wrapped.get(name)

    def run(*args, **kwargs):
        with wrapped.trace(*args, **kwargs):
            value = module.output.save()
        return {name: value}

    return run


def edit(model, name, change):
    wrapped = wrap(model)
    module = wrapped.get(name)

    def run(*args, **kwargs):
        with wrapped.trace(*args, **kwargs):
            module.output = change(module.output)
            out = wrapped.output.save()
        return out

    return run


def gradient(model, name):
    wrapped = wrap(model)
    module = wrapped.get(name)

    def run(*args, **kwargs):
        with wrapped.trace(*args, **kwargs):
            hidden = module.output
            with wrapped.output.sum().backward():
                grad = hidden.grad.save()
        return grad

    return run


def stop(model, name):
    wrapped = wrap(model)
    module = wrapped.get(name)

    def run(*args, **kwargs):
        with wrapped.trace(*args, **kwargs) as tracer:
            value = module.output.save()
            tracer.stop()
        return value

    return run


def operation(model, name, function):
    wrapped = wrap(model)
    module = wrapped.get(name) if name else wrapped

    def run(*args, **kwargs):
        with wrapped.trace(*args, **kwargs):
            value = getattr(module.source, f"torch_{function}_0").output.save()
        return value

    return run


def generate(model, names, steps):
    wrapped = wrap(model)
    modules = [wrapped.get(name) for name in names]

    def run(ids):
        with wrapped.generate(
            ids, max_new_tokens=steps, min_new_tokens=steps, do_sample=False
        ) as tracer:
            cache = tracer.cache(modules=modules)
        return {name: cached(cache, name) for name in names}

    return run
