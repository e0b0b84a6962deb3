"""The promises over architectures that nobody here wrote, as a table.

    python benchmarks/zoo.py                all of them, about 15 minutes: writes latest/zoo.*
    python benchmarks/zoo.py bert "U-Net"   only these rows of it anew
    python benchmarks/zoo.py --find         try every model type of transformers; those that run
                                            become tests/zoo/architectures.txt

Each architecture has a process of its own with a time limit: a bad one stops no other. What is
checked is in tests/zoo/promises.py; the tests check the same. zoo.md is made of zoo.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: forked processes, one thread each
HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(TESTS / "zoo"), str(TESTS)]

import architectures  # noqa: E402
import handwritten  # noqa: E402
import packages  # noqa: E402
import promises  # noqa: E402
import torch  # noqa: E402
from latest import held, write  # noqa: E402

WORKERS = 2
SECONDS = 600


KINDS: dict[str, Callable[[str], bool]] = {
    "Small models of many kinds": lambda name: name in handwritten.MODELS,
    "Models with real weights": lambda name: name in packages.MODELS,
    "transformers, from shrunken configs with random weights": lambda name: name in LISTED,
}
LISTED = architectures.names()

# One architecture, in a process of its own.


def examine(name: str) -> dict[str, Any]:
    """What `promises.check` finds in an architecture."""
    torch.manual_seed(0)
    if name in handwritten.MODELS:
        model, step = handwritten.MODELS[name]()
    elif name in packages.MODELS:
        model, step = packages.MODELS[name]()
    else:
        model, arguments = architectures.build(name)
        step = promises.forward_and_backward(arguments)
    found = vars(promises.check(model, step))
    silent: dict[str, Counter[str]] = {}
    for path, reason in found["silent"].items():
        kind = re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
        silent.setdefault(reason, Counter())[kind] += 1
    return found | {"silent": silent}


def try_out(name: str) -> dict[str, Any]:
    """Whether an architecture can be built, run and trained at all."""
    model, arguments = architectures.build(name)
    promises.forward_and_backward(arguments)(model)
    if all(parameter.grad is None for parameter in model.parameters()):
        raise architectures.CannotBuild("run: no parameter gets a gradient")
    return {"arguments": sorted(arguments)}


def work(task: Callable[[str], dict[str, Any]], name: str, connection: Any) -> None:
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    began = time.perf_counter()
    try:
        result = task(name)
    except Exception as error:  # noqa: BLE001 - whatever an architecture does is a result
        result = {"error": f"{type(error).__name__}: {error}"}
    connection.send(result | {"seconds": round(time.perf_counter() - began, 1)})


def run_all(task: Callable[[str], dict[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    """A task for each name, in a few processes at a time, each killed after its time."""
    context = multiprocessing.get_context("fork")
    waiting, running, results = list(names), {}, {}
    order = list(waiting)
    while waiting or running:
        while waiting and len(running) < WORKERS:
            name = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(task, name, theirs))
            process.start()
            theirs.close()
            running[ours] = name, process, time.monotonic() + SECONDS
        ready = wait(list(running), timeout=1)
        late = [c for c, (_, _, end) in running.items() if time.monotonic() > end]
        for connection in {*ready, *late}:
            name, process, _ = running.pop(connection)
            try:
                found = connection.recv() if connection.poll() else {"error": "took too long"}
            except EOFError:
                found = {"error": "the process died"}
            process.kill()
            process.join()
            results[name] = found
            state = found.get("error") or found.get("wrong") or "fine"
            print(f"{len(results):4} of {len(order)}  {name}: {str(state)[:200]}", flush=True)
    return {name: results[name] for name in order}


# The list of those that run.


def find() -> None:
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    results = run_all(try_out, sorted(MODEL_MAPPING_NAMES))
    good = [name for name, found in results.items() if "error" not in found]
    architectures.LIST.write_text("\n".join(good) + "\n")
    found = held("zoo")
    found.setdefault("architectures", {})
    found["left out"] = dict(Counter(why_not(f["error"]) for f in results.values() if "error" in f))
    save(found)
    print(f"{len(good)} of {len(results)} run; left out: {found['left out']}")


def why_not(error: str) -> str:
    """The kind of failure of an architecture."""
    if "requires the" in error and "library" in error:
        return "a library is missing (timm, natten, Pillow …)"
    if "run" not in error:
        return "the shrunken config does not fit together, or is still large"
    return "the naive arguments do not fit, or nothing can be trained"


def preload() -> None:
    """Import what most architectures need, once, before processes are forked."""
    import transformers
    from transformers import BertModel, CLIPModel, LlamaModel, LlavaModel, Wav2Vec2Model

    transformers.logging.set_verbosity_error()
    assert all((BertModel, CLIPModel, LlamaModel, LlavaModel, Wav2Vec2Model))


# The table.

HEADING = [
    "| architecture | modules | places fired | gradients refused | never called | exact |",
    "|---|--:|--:|--:|---|---|",
]
BEFORE = """\
# The zoo

Written by `python benchmarks/zoo.py`. Each architecture is run bare twice, then with captures of
every module's inputs, outputs and output gradients (attached, detached, and outputs alone), then
with hooks written by hand. *Exact* means: outputs, parameter gradients, buffers and random states
are those of the bare run, bit for bit; the record holds what the hooks by hand have seen; all that
fired can be read, or reading gives the reason; no hook, attribute, warning or reference is left.

{count} architectures, {modules:,} modules, {places:,} places that fired, with {values:,} values.
**Rows that are not exact: {inexact}.** Rows where two bare runs differ: {unsteady}.

A gradient is refused on reading, with one of these reasons:

{refused}

Never called: *not reached* (a part that this forward does not use), *weights used without it*,
*its children are called one by one* (a Sequential that is iterated over), or *forward called
directly*. A number in a path is written as `*`.
"""


def row(name: str, found: dict[str, Any]) -> str:
    if "error" in found:
        return f"| {name} | | | | | **{found['error'].splitlines()[0][:80]}** |"
    silent = "; ".join(
        f"{sum(kinds.values())} {reason} ({', '.join(shortened(kinds))})"
        for reason, kinds in sorted(found["silent"].items())
    )
    exact = "yes" if not found["wrong"] else f"**no**: {'; '.join(found['wrong'])[:300]}"
    if found["unsteady"]:
        exact += f" (but in {', '.join(found['unsteady'][:3])} two bare runs differ, too)"
    refused = sum(found["refused"].values()) or ""
    columns = (name, found["modules"], found["places"], refused, silent, exact)
    return f"| {' | '.join(map(str, columns))} |"


def shortened(paths: Iterable[str]) -> list[str]:
    quoted = [f"`{path}`" for path in paths]
    return quoted if len(quoted) <= 3 else [*quoted[:2], f"{len(quoted) - 2} more"]


def table(results: dict[str, Any], left_out: dict[str, int]) -> str:
    good = [found for found in results.values() if "error" not in found]
    refused = sum((Counter(found["refused"]) for found in good), Counter[str]())
    text = BEFORE.format(
        count=len(results),
        **{key: sum(found[key] for found in good) for key in ("modules", "places", "values")},
        inexact=len(results) - sum(not found["wrong"] for found in good),
        unsteady=sum(bool(found["unsteady"]) for found in good),
        refused="\n".join(f"- {n:,} × {reason}" for reason, n in refused.most_common()),
    )
    lines = [text]
    for title, belongs in KINDS.items():
        rows = [row(name, found) for name, found in results.items() if belongs(name)]
        lines += [f"## {title}", "", *HEADING, *rows, ""]
    if left_out:
        lines += ["Model types of transformers that are left out, since they do not run so:", ""]
        lines += [f"- {count} × {reason}" for reason, count in left_out.items()]
    return "\n".join(lines) + "\n"


def save(found: dict[str, Any]) -> None:
    """The results, one architecture a line, and the page that is made of them."""
    rows = [f"{json.dumps(name)}: {json.dumps(f)}" for name, f in found["architectures"].items()]
    text = f'{{"left out": {json.dumps(found.get("left out", {}))},\n"architectures": {{\n'
    write("zoo", text + ",\n".join(rows) + "\n}}\n", full=True)
    write("zoo.md", table(found["architectures"], found.get("left out", {})), full=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="architectures; all if none is named")
    parser.add_argument("--find", action="store_true", help="make the list of those that run")
    options = parser.parse_args()
    preload()
    if options.find:
        find()
        return
    found = held("zoo")
    installed = [name for name in packages.MODELS if not packages.missing(name)]
    every = [*handwritten.MODELS, *installed, *LISTED]
    known = found.get("architectures", {}) if options.names else {}
    found["architectures"] = known | run_all(examine, options.names or every)
    save(found)


if __name__ == "__main__":
    main()
