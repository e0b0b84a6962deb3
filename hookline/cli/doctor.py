"""The command `doctor`: check the installed versions, the private parts of torch, and the extras.

- `doctor`: the command
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable
from typing import Any

import click
import torch
from torch import nn

import hookline as hl
from hookline import torch_probes
from hookline.cli.options import takes_screen
from hookline.cli.output import Screen, show_number
from hookline.supported_versions import NEWEST_TORCH, OLDEST_TORCH, PYTHONS, is_tested_torch

__all__ = ["doctor"]

_EXTRAS = {
    "report": ("matplotlib", "figures"),
    "transformers": ("transformers", "hf: models, Trainer callbacks"),
    "lightning": ("lightning", "Lightning callbacks"),
    "tensorboard": ("tensorboard", "writing watched values to TensorBoard"),
    "wandb": ("wandb", "writing watched values to wandb"),
    "ray": ("ray", "harvesting with Ray Data"),
    "cli": ("tqdm", "progress bars"),
}

Row = tuple[str, str, str]


@click.command()
@takes_screen
def doctor(screen: Screen) -> None:
    """Check whether hookline works on this machine.

    Lists versions, devices and extras. Each private part of torch that hookline uses is tried, and
    what differs is listed with the features that need it. The exit code is 1 if there is a problem.
    """
    rows = [*_versions(), *_verbs(), *_private_parts(), *_devices(), *_extras()]
    broken = sum(state == "broken" for _, state, _ in rows)
    title = f"{show_number(broken, 'problem')} found" if broken else "No problems found"
    names = ("what", "state", "note")
    data = [dict(zip(names, row, strict=True)) for row in rows]
    screen.table(title, [names, *rows], data)
    click.get_current_context().exit(1 if broken else 0)


def _versions() -> list[Row]:
    python = platform.python_version()
    tested = python.rpartition(".")[0] in PYTHONS
    note = "tested" if tested else f"not tested; the tests run with {', '.join(PYTHONS)}"
    rows: list[Row] = [("hookline", hl.__version__, ""), ("Python", python, note)]
    for name in ("torch", "numpy", "safetensors"):
        note = _torch_note() if name == "torch" else ""
        rows.append(_installed(name, note, "broken", f"not installed; pip install {name}"))
    return rows


def _installed(package: str, note: str, otherwise: str, remedy: str) -> Row:
    """Return the version of a package, or another state with a remedy if it is not there."""
    try:  # not by find_spec, which takes the folder that wandb writes for wandb
        return package, importlib.metadata.version(package), note
    except importlib.metadata.PackageNotFoundError:
        return package, otherwise, remedy


def _torch_note() -> str:
    """Say whether hookline was tested with the installed torch."""
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST_TORCH, NEWEST_TORCH))
    if is_tested_torch():
        return f"tested (as are all from {oldest} to {newest})"
    release = torch.__version__.split(".")[:2]
    newer = all(part.isdigit() for part in release) and (*map(int, release),) > NEWEST_TORCH
    what = f"newer than {newest}, the newest tested version" if newer else "not a tested release"
    return f"{what}; the checks below tell what works"


# -- whole features --------------------------------------------------------------------------------


def _verbs() -> list[Row]:
    tried: list[tuple[str, Callable[[], None], str]] = [
        ("capture", _try_capture, "values cannot be captured"),
        ("gradients", _try_gradients, "gradients cannot be captured"),
        ("edits", _try_edit, "values cannot be edited"),
    ]
    rows: list[Row] = []
    for name, function, otherwise in tried:
        try:
            function()
            rows.append((name, "ok", ""))
        except Exception as error:  # noqa: BLE001 - whatever is wrong here
            rows.append((name, "broken", f"{otherwise} ({type(error).__name__}: {error})"))
    return rows


def _try_capture() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    with torch.no_grad(), hl.capture(model, "0") as record:
        expected = model(torch.ones(1, 2))
    _expect(torch.equal(record["0"], expected))


def _try_gradients() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    with hl.capture(model, "0:grad_output", "1:grad_input") as record:
        model(torch.ones(1, 2)).sum().backward()
    _expect(torch.equal(record["0:grad_output"], record["1:grad_input"]))


def _try_edit() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    with hl.edit(model, "0", hl.zero()):
        _expect(not model(torch.ones(1, 2)).any())


def _expect(holds: Any) -> None:
    if not holds:
        raise ValueError("the values are wrong")


# -- private parts of torch ------------------------------------------------------------------------


def _private_parts() -> list[Row]:
    """Return a row for each group of probes that pass, and one for each probe that fails."""
    # The compiler is loaded by its own group, and then the other groups try more.
    groups = sorted(torch_probes.GROUPS, key=lambda group: group != "compiler")
    found = {group: torch_probes.run(group) for group in groups}
    rows: list[Row] = []
    for group, features in torch_probes.GROUPS.items():
        outcomes = found[group]
        failed = [outcome for outcome in outcomes if outcome.state == "differs"]
        absent = {outcome.reason: None for outcome in outcomes if outcome.state == "absent"}
        for outcome in failed:
            note = f"{features} will not work: {outcome.reason}"
            rows.append((f"torch: {outcome.probe.name}", "broken", note))
        if absent:
            rows.append((f"torch: {group}", "limited", "; ".join(absent)))
        elif not failed:
            note = f"{features} ({show_number(len(outcomes), 'check')})"
            rows.append((f"torch: {group}", "ok", note))
    return rows


# -- devices and extras ----------------------------------------------------------------------------


def _devices() -> list[Row]:
    rows: list[Row] = [("CPU", "ok", show_number(torch.get_num_threads(), "thread"))]
    if torch.cuda.is_available():
        devices = show_number(torch.cuda.device_count(), "device")
        rows.append(("CUDA", "ok", f"{devices}; hookline's tests run on the CPU only"))
    else:
        rows.append(("CUDA", "absent", ""))
    return rows


def _extras() -> list[Row]:
    return [
        _installed(package, purpose, "absent", f"{purpose}; pip install 'hookline[{extra}]'")
        for extra, (package, purpose) in _EXTRAS.items()
    ]
