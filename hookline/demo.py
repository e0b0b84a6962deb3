"""A demonstration of hookline from end to end: `hookline demo`, or `make demo`.

It trains a small CNN to read digits, with something wrong in the training that hookline reports.
Then it stores, changes and guards values of the CNN, and writes a page that shows them.
"""

import logging
import os
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookline as hl

__all__ = ["main"]


class Digits(NamedTuple):
    """Grey images of 8 x 8 pixels, and the digit that each one shows."""

    images: Tensor
    labels: Tensor


class Net(nn.Module):
    """Two convolutions and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(16, 16, kernel_size=3, padding=1)
        self.relu2 = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(16 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu2(self.conv2(self.relu1(self.conv1(x))))
        return self.fc(self.pool(x).flatten(1))


def main(folder: str | Path | None = None) -> Path:
    """Run the whole demonstration, print an account of it, and return the page that it wrote."""
    torch.set_num_threads(1)  # the same figures whatever the number of cores
    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp(prefix="hookline-demo-") if folder is None else folder)
    known, unseen = draw_digits()
    model = Net()

    show_training(model, known, unseen, folder / "run")
    model.eval()
    before = copy_state(model)
    show_harvest(model, known, folder / "activations")
    show_channels(model, unseen)
    show_patching(model, unseen)
    show_guard(model, unseen, folder / "fault")

    heading("Afterwards", "hl.attached(model)")
    same = torch.equal(before, copy_state(model)) and not hl.attached(model)
    say(f"    the weights are the same bit for bit, no hook is left: {same}")

    heading("See it all: one file, no network", "hl.report(run, to=…)")
    page = hl.report(hl.Run.open(folder / "run"), folder / "report.html", model=model)
    say(f"    {page}", "bold")
    return page


# -- the acts -------------------------------------------------------------------------------------


def show_training(model: Net, known: Digits, unseen: Digits, run: Path) -> None:
    """Train with a mistake, print the findings, correct it, and train on."""
    heading("Train, and be told what is wrong", "with hl.watch(model, every=5, to=run):")
    with torch.no_grad():
        cast(Tensor, model.conv2.bias).fill_(-8.0)  # what is wrong
    findings, loss = train(model, known, run, epochs=2)
    say(f"    2 epochs: loss {loss:.3f}, test accuracy {accuracy(model, unseen):.1%}")
    for finding in findings[:1]:
        say(f"    ! {finding.kind} at {finding.place}, step {finding.step}", "red")
        lines(finding.message)
        lines(finding.advice, "dim")
    with torch.no_grad():
        cast(Tensor, model.conv2.bias).zero_()
    findings, loss = train(model, known, run, epochs=10, start=2 * 22)
    say(
        f"    bias of conv2 set to 0, 10 more epochs: loss {loss:.3f}, "
        f"test accuracy {accuracy(model, unseen):.1%}, {len(findings)} findings",
        "green",
    )


def train(
    model: nn.Module, digits: Digits, run: Path, epochs: int, start: int = 0
) -> tuple[list[hl.Finding], float]:
    """Train under `watch`; return the findings and the last loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss = torch.tensor(0.0)
    logging.getLogger("hookline").setLevel(logging.ERROR)  # findings are printed here instead
    with hl.watch(model, every=5, to=run, optimizer=optimizer, start=start) as watching:
        for _ in range(epochs):
            for batch in torch.split(torch.randperm(len(digits.labels)), 64):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(digits.images[batch]), digits.labels[batch])
                loss.backward()
                watching.log(loss=loss.item())
                optimizer.step()
    optimizer.zero_grad()
    return watching.findings(), loss.item()


def show_harvest(model: nn.Module, digits: Digits, folder: Path) -> None:
    """Store the output of relu2 for every digit."""
    heading("Keep activations on disk", 'hl.harvest(model, batches, "relu2", to=…)')
    batches = torch.split(digits.images, 128)
    store = hl.harvest(model, batches, "relu2", to=folder, dtype=torch.bfloat16, quiet=True)
    active = (store["relu2"][:] > 0).float().mean((0, 2, 3))
    say(
        f"    {tuple(store['relu2'].shape)} in {store.info().nbytes / 1e6:.1f} MB of safetensors; "
        f"channels are active on {active.min():.0%} to {active.max():.0%} of the pixels"
    )


def show_channels(model: nn.Module, digits: Digits) -> None:
    """Switch off one channel after another."""
    heading("Ablate: which channels matter?", 'hl.edit(model, "conv2", hl.zero(), at=np.s_[:, n])')
    whole, falls = accuracy(model, digits), list[float]()
    for channel in range(16):
        with hl.edit(model, "conv2", hl.zero(), at=np.s_[:, channel]):
            falls.append(whole - accuracy(model, digits))
    worst = max(range(16), key=falls.__getitem__)
    row = strip(falls, max(falls))
    say(f"    {row}  without channel {worst}, test accuracy falls by {falls[worst]:.1%}")


def show_patching(model: nn.Module, digits: Digits) -> None:
    """Patch rows of values from a run on a 3 into a run on an 8."""
    heading("Patch: what tells a 3 from an 8?", 'hl.sweep(model, three, eight, "conv*", metric, …)')
    three, eight = (digits.images[digits.labels == digit][:1] for digit in (3, 8))
    sweep = hl.sweep(
        model, three, eight, "conv*", lambda logits: (logits[:, 3] - logits[:, 8]).sum(),
        positions="all", dim=2, progress=False,
    )  # fmt: skip
    for place, changes in zip(sweep.places, sweep.matrix, strict=True):
        row = strip([float(change) for change in changes], sweep.matrix.max().item())
        say(f"    {row}  rows 0 to 7 at {place}")


def show_guard(model: nn.Module, digits: Digits, folder: Path) -> None:
    """Make a weight too large, and print where the first bad number comes from."""
    heading("Guard: who made the infinity?", "with hl.guard(model):")
    try:
        with hl.edit(model, "conv2.weight", hl.scale(1e38)), hl.guard(model, to=folder):
            model(digits.images * 100)
    except hl.NonFiniteError as error:
        lines(error.asked)
        for line in error.found.splitlines()[:3]:
            lines(line.strip(), "dim")


# -- the data and the model -----------------------------------------------------------------------


Points = list[tuple[float, float]]


def arc(x: float, y: float, width: float, height: float, begin: int, end: int) -> Points:
    """Return points on an ellipse around (x, y), from one angle to another, in degrees."""
    angles = np.radians(np.linspace(begin, end, 12))
    return [(x + width * np.cos(angle), y + height * np.sin(angle)) for angle in angles]


# The strokes of each digit in a square of size 1; y grows downwards.
_STROKES: list[list[Points]] = [
    [arc(0.5, 0.5, 0.3, 0.44, 0, 360)],
    [[(0.3, 0.25), (0.52, 0.06), (0.52, 0.94)]],
    [[*arc(0.5, 0.3, 0.28, 0.24, 180, 380), (0.22, 0.92), (0.8, 0.92)]],
    [arc(0.47, 0.28, 0.26, 0.22, 200, 450), arc(0.47, 0.71, 0.29, 0.22, 270, 520)],
    [[(0.62, 0.94), (0.62, 0.06), (0.18, 0.64), (0.84, 0.64)]],
    [[(0.76, 0.07), (0.3, 0.07), (0.27, 0.45), *arc(0.47, 0.67, 0.29, 0.25, 250, 510)]],
    [[(0.66, 0.06), (0.36, 0.34), (0.24, 0.6)], arc(0.5, 0.69, 0.26, 0.24, 0, 360)],
    [[(0.2, 0.08), (0.8, 0.08), (0.42, 0.94)]],
    [arc(0.5, 0.28, 0.22, 0.21, 0, 360), arc(0.5, 0.71, 0.28, 0.23, 0, 360)],
    [arc(0.5, 0.31, 0.26, 0.24, 0, 360), [(0.76, 0.31), (0.74, 0.6), (0.6, 0.94)]],
]


def draw_digits(number: int = 1800, seed: int = 0) -> tuple[Digits, Digits]:
    """Draw digits; return three quarters of them to learn from, and the rest to test on."""
    random = np.random.default_rng(seed)
    labels: list[int] = random.permutation(np.arange(number) % 10).tolist()
    drawn = np.stack([draw(_STROKES[label], random) for label in labels])
    images = torch.tensor(drawn, dtype=torch.float32).unsqueeze(1)
    answers, split = torch.tensor(labels), number * 3 // 4
    return Digits(images[:split], answers[:split]), Digits(images[split:], answers[split:])


def draw(strokes: list[Points], random: np.random.Generator) -> npt.NDArray[np.float64]:
    """Draw one digit on 8 x 8 pixels: turned, slanted, stretched and moved, with noise."""
    lines = [(begin, end) for points in strokes for begin, end in pairwise(points)]
    angle, slant = random.normal(0, 0.15, 2)
    turn = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    stretch = [[random.uniform(0.7, 1.05), slant], [0, random.uniform(0.75, 1.05)]]
    ends = (np.array(lines) - 0.5) @ (np.array(turn) @ stretch).T + random.normal(0, 0.04, 2)
    ends = ends * 6.8 + 3.5  # in pixels
    begin, along = ends[:, 0], ends[:, 1] - ends[:, 0]
    pixels = np.stack(np.meshgrid(np.arange(8), np.arange(8)), -1)[:, :, None]
    share = (((pixels - begin) * along).sum(-1) / (along**2).sum(-1)).clip(0, 1)
    distance = np.linalg.norm(begin + share[..., None] * along - pixels, axis=-1).min(-1)
    ink = (random.uniform(0.9, 1.3) - distance).clip(0, 1)
    return (ink + random.normal(0, 0.1, (8, 8))).clip(0, 1)


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """Return the share of images that are read correctly."""
    return (model(digits.images).argmax(1) == digits.labels).float().mean().item()


def copy_state(model: nn.Module) -> Tensor:
    """Return all parameters and buffers in one tensor."""
    return torch.cat([tensor.flatten() for tensor in model.state_dict().values()])


# -- the account ----------------------------------------------------------------------------------

_STYLES = {"bold": "1", "dim": "2", "red": "1;31", "green": "32", "title": "1;36"}


def say(text: str, style: str = "") -> None:
    """Print one line of the account, with colours on a terminal."""
    colours = bool(sys.stdout) and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if style and colours else text)


def heading(title: str, code: str) -> None:
    """Print the title of a section and the line of code that it is about."""
    say(f"\n{title}", "title")
    say(f"  {code}", "dim")


def lines(text: str, style: str = "") -> None:
    """Print a longer text, folded and set in."""
    for line in textwrap.wrap(text, 86):
        say(f"    {line}", style)


def strip(values: Sequence[float], highest: float) -> str:
    """Return numbers as a row of small bars."""
    blocks = "·▁▂▃▄▅▆▇█"
    return "".join(blocks[min(8, max(0, round(8 * value / highest)))] for value in values)


if __name__ == "__main__":
    main()
