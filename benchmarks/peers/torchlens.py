"""torchlens, as in its README: tl.trace, tl.record, tl.summary, tl.extract_dataset."""

from __future__ import annotations

import functools
import operator

import torchlens as tl

PACKAGE = "torchlens"
TITLE = "torchlens"
SOURCE = "README of 2.36.1; docstrings of trace, record, summary and extract_dataset"
NOTES = {
    "capture": "does much more: every operation with its metadata; for a few modules tl.record, "
    "which its README names for tight loops, for all of them tl.trace",
    "edit": "tl.trace with intervene=",
    "gradient": "save_grads=True keeps those of every operation; with a selector it is faster, and "
    "wrong without a word where an in-place operation follows",
    "stop": "tl.trace with halt=; with tl.record the rest of the model runs",
    "process": "torch's functions stay wrapped for the process after the first use",
    "memory": "measured in its process after the timed runs, since it refuses to work in a fork",
}
ABSENT = {
    "edit_parameter": "none",
    "inputs": "operations know their parents; there is no one way to ask for a module's argument",
}
MANY = 50
FORKS = False  # it refuses to work in a forked process


def selector(names):
    return functools.reduce(operator.or_, [tl.module(name) for name in names])


def recorded(recording, name):
    return [one.ram_payload for one in recording.activations_by_address(name)]


def capture(model, names):
    if len(names) > MANY:

        def run(*args, **kwargs):
            log = tl.trace(model, args, kwargs or None)
            return {name: log.modules[name].out for name in names}

        return run
    chosen = selector(names)

    def run_record(*args, **kwargs):
        recording = tl.record(model, args, kwargs or None, save=chosen)
        return {name: recorded(recording, name)[-1] for name in names}

    return run_record


def calls(model, names):
    chosen = selector(names)

    def run(*args, **kwargs):
        recording = tl.record(model, args, kwargs or None, save=chosen)
        return {name: recorded(recording, name) for name in names}

    return run


def nested(model, name):
    def run(*args, **kwargs):
        return {name: tl.trace(model, args, kwargs or None).modules[name].outs}

    return run


def attached(model, name):
    options = tl.options.CaptureOptions(backward_ready=True)

    def run(*args, **kwargs):
        return {name: tl.trace(model, args, kwargs or None, capture=options).modules[name].out}

    return run


def edit(model, name, change):
    def act(value, *args, **kwargs):
        return change(value)

    intervention = tl.when(tl.module(name), act)

    def run(*args, **kwargs):
        log = tl.trace(model, args, kwargs or None, intervene=intervention)
        return log[log.output_layers[0]].out

    return run


def gradient(model, name):
    options = tl.options.CaptureOptions(save_grads=True)

    def run(*args, **kwargs):
        log = tl.trace(model, args, kwargs or None, capture=options)
        log.log_backward(log[log.output_layers[0]].out.sum())
        return log[name].grad

    return run


def stop(model, name):
    where = tl.module(name)

    def run(*args, **kwargs):
        log = tl.trace(model, args, kwargs or None, save=where, halt=where)
        return log[log.output_layers[0]].out

    return run


def operation(model, name, function):
    where = tl.func(function) & tl.in_module(name) if name else tl.func(function)

    def run(*args, **kwargs):
        recording = tl.record(model, args, kwargs or None, save=where)
        return next(iter(recording)).ram_payload

    return run


def summary(model):
    return lambda *args: str(tl.summary(model, list(args)))


def generate(model, names, steps):
    def run(ids):
        settings = {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False}
        log = tl.trace(model.generate, [ids], settings)
        return {
            name: [call.out for call in log.modules[f"owner.{name}"].calls.values()]
            for name in names
        }

    return run


def to_disk(model, names):
    def run(batches, folder):
        rows = [row for batch in batches for row in batch]
        tl.extract_dataset(
            model, rows, list(names), batch_size=len(batches[0]), output_dir=folder, progress=False
        )

    run.read = lambda folder, name: tl.load_extraction(folder).activations[name]
    return run
