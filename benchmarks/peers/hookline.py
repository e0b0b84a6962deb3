"""hookline, as in docs/all-of-hookline.md."""

from __future__ import annotations

import hookline as hl

PACKAGE = "hookline"
TITLE = "hookline"
SOURCE = "docs/all-of-hookline.md"
NOTES = {
    "capture": "`blocks.*` and `**`; values are snapshots that no later in-place operation changes",
    "to_disk": "one store that any reader of safetensors opens; sync='never', since no other "
    "library here forces its files onto the disk",
}
ABSENT = {}
MANY = 50


def where(names):
    """The places as one would write them: all modules, a row of numbered ones, or their names."""
    if len(names) > MANY:
        return ["**"]
    rows = {name.rpartition(".")[0] for name in names if name.rpartition(".")[2].isdigit()}
    return [f"{row}.*" for row in rows] if len(rows) == 1 and len(names) > 1 else names


def capture(model, names):
    places = where(names)

    def run(*args, **kwargs):
        with hl.capture(model, *places) as record:
            model(*args, **kwargs)
        return {name: record[name] for name in names}

    return run


def calls(model, names):
    def run(*args, **kwargs):
        with hl.capture(model, *names) as record:
            model(*args, **kwargs)
        return {name: record.calls(name) for name in names}

    return run


def inputs(model, name, keyword=None):
    def run(*args, **kwargs):
        with hl.capture(model, f"{name}:input") as record:
            model(*args, **kwargs)
        return record[f"{name}:input"]

    return run


def edit(model, name, change):
    def run(*args, **kwargs):
        with hl.edit(model, name, change):
            return model(*args, **kwargs)

    return run


def gradient(model, name):
    def run(*args, **kwargs):
        with hl.capture(model, f"{name}:grad_output") as record:
            model(*args, **kwargs).sum().backward()
        return record[f"{name}:grad_output"]

    return run


def stop(model, name):
    def run(*args, **kwargs):
        with hl.capture(model, name, stop=True) as record:
            model(*args, **kwargs)
        return record[name]

    return run


def operation(model, name, function):
    def run(*args, **kwargs):
        with hl.capture(model, f"{name}/{function}") as record:
            model(*args, **kwargs)
        return record[f"{name}/{function}"]

    return run


def generate(model, names, steps):
    places = where(names)

    def run(ids):
        with hl.capture(model, *places) as record:
            model.generate(ids, max_new_tokens=steps, min_new_tokens=steps, do_sample=False)
        return {name: record.calls(name) for name in names}

    return run


def to_disk(model, names):
    places = where(names)

    def run(batches, folder):
        with hl.Store.create(folder, sync="never") as store:
            for batch in batches:
                with hl.capture(model, *places) as record:
                    model(batch)
                store.append({name: record[name] for name in names})

    run.read = lambda folder, name: hl.Store.open(folder)[name][:]
    return run


def edit_parameter(model, name, tensor):
    def run(*args, **kwargs):
        with hl.edit(model, name, tensor):
            return model(*args, **kwargs)

    return run


def summary(model):
    return lambda *args: hl.summarize(model, *args).show(depth=10)
