"""What watching costs a training step, against histograms of every gradient written by hand.

    python benchmarks/watch.py              about two minutes
    python benchmarks/watch.py --rounds 5   quicker, noisier

The training step of a 6-layer, 256-wide transformer with 512 tokens runs bare, watched at every
module, and with `torch.histc` of every gradient, as loggers do it. The variants take turns in a new
order every round. A measured step is timed with all that belongs to it: hooks placed and removed,
statistics, histograms, findings, files. `every=50` is one measured step and 49 that are not, each
timed on its own. Prints the ratios with the goals and writes latest/watch.json.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from latest import in_full, write
from timing import Race, machine
from torch import Tensor, nn

import hookline as hl

GOALS = {"watch, every=50": 1.05, "watch, every=1": 1.5}


class Model(nn.Module):
    def __init__(self, layers: int = 6, width: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        layer = nn.TransformerEncoderLayer(
            width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1000)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)))


def training() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    tokens = torch.randint(0, 1000, (4, 128))

    def step() -> None:
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def by_hand(model: nn.Module) -> list[Tensor]:
    """A histogram of every gradient, at every step, as it arrives."""
    found: list[Tensor] = []

    def binned(grad: Tensor) -> None:
        flat = grad.detach().flatten()
        low, high = flat.min().item(), flat.max().item()
        found.append(torch.histc(flat, bins=64, min=low, max=high))
        if len(found) > 1000:
            found.clear()

    for parameter in model.parameters():
        parameter.register_hook(binned)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--passes", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    _, _, bare = training()
    _, _, again = training()
    model, optimizer, measured = training()
    hl.watch(model, every=1, to=folder / "measured", optimizer=optimizer).attach()
    other, optimizer, between = training()
    hl.watch(other, every=10**9, to=folder / "between", optimizer=optimizer, start=1).attach()
    hand, _, histograms = training()
    by_hand(hand)
    race = Race(
        {"bare": bare, "bare again": again, "measured": measured, "between": between,
         "histc by hand": histograms}
    )  # fmt: skip
    try:
        race.warm_up(3)
        for _ in range(options.passes):
            race.run(options.rounds)
    finally:
        hl.attached(model).remove()
        hl.attached(other).remove()
        shutil.rmtree(folder)
    where = machine()
    rows = len(hl.select(model, "**"))
    print(f"{where['cpu']}, torch {where['torch']}, {rows} modules, 512 tokens a step")
    base, base_median = race.fast("bare"), race.median("bare")
    times = {name: race.fast(name) for name in race.variants}
    medians = {name: race.median(name) for name in race.variants}
    for kept in (times, medians):
        kept["watch, every=1"] = kept["measured"]
        kept["watch, every=50"] = (kept["measured"] + 49 * kept["between"]) / 50
    result: dict[str, object] = {"machine": where, "rounds": race.rounds}
    print(f"\n  {'':18} {'ms':>8} {'× bare':>8} {'median':>8}   goal")
    for name in ("bare", "bare again", "watch, every=50", "watch, every=1", "histc by hand"):
        ratio, middle = times[name] / base, medians[name] / base_median
        goal = GOALS.get(name)
        told = "" if goal is None else f"{goal} {'pass' if ratio <= goal else 'miss'}"
        print(f"  {name:18} {times[name] / 1e3:8.1f} {ratio:8.3f} {middle:8.3f}   {told}")
        result[name] = {"ms": times[name] / 1e3, "ratio": ratio, "median ratio": middle}
    write("watch", result, in_full(parser, options))


if __name__ == "__main__":
    main()
