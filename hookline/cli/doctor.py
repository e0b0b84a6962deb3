"""`hookline doctor`: versions, what is installed, what will not work here and why."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable
from typing import Any

import click
import torch
from torch import nn

import hookline as hl
from hookline.cli.options import takes_screen
from hookline.cli.output import Screen, show_number

__all__ = ["doctor"]

_EXTRAS = {
    "report": ("matplotlib", "figures"),
    "transformers": ("transformers", "hf: models and the Trainer callbacks"),
    "lightning": ("lightning", "the Lightning callbacks"),
    "tensorboard": ("tensorboard", "watch writing to TensorBoard"),
    "wandb": ("wandb", "watch writing to wandb"),
    "ray": ("ray", "harvesting with Ray Data"),
    "cli": ("tqdm", "progress bars"),
}

Row = tuple[str, str, str]


@click.command()
@takes_screen
def doctor(screen: Screen) -> None:
    """Tell what is installed, and what will not work here and why."""
    rows = [*_versions(), *_features(), *_devices(), *_extras()]
    names = ("what", "state", "note")
    broken = [row for row in rows if row[1] == "broken"]
    title = f"{len(broken)} problems" if broken else "hookline works here"
    data = [dict(zip(names, row, strict=True)) for row in rows]
    screen.table(title, [names, *rows], data)
    click.get_current_context().exit(1 if broken else 0)


def _versions() -> list[Row]:
    rows = [("hookline", hl.__version__, ""), ("Python", platform.python_version(), "")]
    for name in ("torch", "numpy", "safetensors"):
        try:
            rows.append((name, importlib.metadata.version(name), ""))
        except importlib.metadata.PackageNotFoundError:
            rows.append((name, "broken", f"not installed: pip install {name}"))
    return rows


def _features() -> list[Row]:
    """Private parts of torch that hookline uses where they are there, tried out."""
    tried: list[tuple[str, Callable[[], Any], str]] = [
        ("capture", _try_capture, "nothing will work"),
        ("gradients", _try_gradients, "gradient places will not work"),
        ("edits", _try_edit, "edits will not work"),
        ("copy-on-write snapshots", _try_lazy, "values are copied instead: slower, and as safe"),
    ]
    rows: list[Row] = []
    for name, function, otherwise in tried:
        try:
            function()
            rows.append((name, "ok", ""))
        except Exception as error:  # noqa: BLE001 - this is what is to be found out
            state = "limited" if name.startswith("copy") else "broken"
            rows.append((name, state, f"{otherwise} ({type(error).__name__}: {error})"))
    return rows


def _try_capture() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    with torch.no_grad(), hl.capture(model, "0") as record:
        expected = model(torch.ones(1, 2))
    assert torch.equal(record["0"], expected)


def _try_gradients() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    with hl.capture(model, "0:grad_output", "1:grad_input") as record:
        model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(record["0:grad_output"], record["1:grad_input"])


def _try_edit() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    with hl.edit(model, "0", hl.zero()):
        assert not model(torch.ones(1, 2)).any()


def _try_lazy() -> None:
    from hookline.values.snapshots import LAZY

    if not LAZY:
        raise RuntimeError(f"torch {torch.__version__} has no _lazy_clone")


def _devices() -> list[Row]:
    rows: list[Row] = [("CPU", "ok", show_number(torch.get_num_threads(), "thread"))]
    if torch.cuda.is_available():
        rows.append(("CUDA", "ok", f"{torch.cuda.device_count()} devices; tested on the CPU only"))
    else:
        rows.append(("CUDA", "absent", ""))
    return rows


def _extras() -> list[Row]:
    rows: list[Row] = []
    for extra, (package, purpose) in _EXTRAS.items():
        try:  # not by find_spec, which takes the folder that wandb writes for wandb
            rows.append((package, importlib.metadata.version(package), purpose))
        except importlib.metadata.PackageNotFoundError:
            rows.append((package, "absent", f"{purpose}: pip install 'hookline[{extra}]'"))
    return rows
