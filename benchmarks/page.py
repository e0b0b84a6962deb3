"""How large the page of a model with 1,000 modules is, and how fast a browser opens it.

    python benchmarks/page.py              about a minute; needs playwright and chromium
    python benchmarks/page.py --rounds 2   quicker, noisier

Three pages take turns: 1,000 modules with values, gradients and parameters of one run; 300 modules
with a histogram each; a training run of 300 places over 500 steps. Each is opened from a file with
the network off, in a new context, several times. "ready" is the time to the tree and the overview,
"drawn" to the first picture of a place that a link leads to, "frame" the median time between two
frames while the tree of all modules scrolls, "worst" the longest. Prints the goals with pass or
miss, and writes latest/page.json.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from latest import in_full, write
from playwright.sync_api import Browser, sync_playwright
from timing import machine
from torch import nn

import hookline as hl
from hookline.training.run_files import STATISTICS, Row
from hookline.training.run_writing import BinCounts, RunWriter

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip
GOALS = {"megabytes": 16.0, "ready": 2.0, "drawn": 2.0, "frame": 34.0}
SCROLL = """async () => {
  const tree = document.querySelector('.tree'), gaps = [];
  let last = performance.now();
  for (let n = 0; n < 60; n++) {
    tree.scrollTop += 400;
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    gaps.push(now - last);
    last = now;
  }
  return gaps;
}"""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.act = nn.Linear(width, 4 * width), nn.ReLU()
        self.down, self.drop = nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


def model_page(folder: Path) -> Path:
    model = nn.Sequential(*(Block(32) for _ in range(167)))
    assert len(list(model.modules())) > 1000
    batch = torch.randn(4, 24, 32)
    return hl.report(model, folder / "model.html", batch=batch, loss=lambda y: y.square().mean())


def record_page(folder: Path) -> Path:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(300)))
    with hl.capture(model, "*", detach=True) as record:
        model(torch.randn(64, 64))
    return hl.report(record, folder / "record.html", model=model)


def run_page(folder: Path) -> Path:
    rows = [Row(f"h.{n}.mlp", "output", "MLP", (8, 64)) for n in range(300)]
    draw = np.random.default_rng(0)
    with RunWriter(folder / "run", rows, model="Net") as writer:
        for step in range(500):
            if step % 50 == 0:
                bins = [BinCounts(-3.0, 3.0, draw.integers(0, 99, 64)) for _ in rows]
                writer.histograms(step, enumerate(bins))
            writer.values(step, draw.random((len(rows), len(STATISTICS)), np.float32))
            writer.scalar(step, "loss", 1 / (1 + step))
    return hl.report(folder / "run", folder / "run.html")


PAGES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "1,000 modules, one run": (model_page, "#place=83.act"),
    "300 modules, a record": (record_page, "#place=150"),
    "300 places, 500 steps": (run_page, "#place=h.150.mlp"),
}


def open_page(browser: Browser, path: Path, link: str) -> dict[str, float]:
    context = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme="light")
    context.set_offline(True)
    page = context.new_page()
    page.set_default_timeout(120_000)
    found: dict[str, float] = {}
    for name, part, wait in (
        ("ready", "", "html[data-ready]"),
        ("drawn", link, ".card .statistics"),
    ):
        page.goto("about:blank")
        start = time.perf_counter()
        page.goto(path.as_uri() + part, wait_until="commit")
        page.wait_for_selector(wait)
        found[name] = time.perf_counter() - start
    page.keyboard.press("/")
    page.keyboard.type(".")  # everything fits: all modules are in the list
    gaps = page.evaluate(SCROLL)
    found["frame"], found["worst"] = statistics.median(gaps), max(gaps)
    context.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("There is no chromium here. Install Debian's: apt-get install chromium")
    where = machine()
    print(f"{where['cpu']}, torch {where['torch']}")
    base = Path(tempfile.mkdtemp())
    result: dict[str, object] = {"machine": where, "goals": GOALS}
    try:
        files: dict[str, Path] = {}
        made: dict[str, float] = {}
        for name, (make, _) in PAGES.items():
            start = time.perf_counter()
            files[name] = make(base)
            made[name] = time.perf_counter() - start
        times: dict[str, list[dict[str, float]]] = {name: [] for name in PAGES}
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=FLAGS)
            for number in range(options.rounds + 1):  # the first warms up
                order = list(PAGES)
                random.Random(number).shuffle(order)
                for name in order:
                    found = open_page(browser, files[name], PAGES[name][1])
                    times[name] += [found] if number else []
            browser.close()
        sizes = {path.name: path.stat().st_size / 1e6 for path in files.values()}
    finally:
        shutil.rmtree(base)
    print(f"\n  {'':24} {'MB':>6} {'made':>7} {'ready':>8} {'drawn':>8} {'frame':>8} {'worst':>8}")
    for name, rounds in times.items():
        best = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        best["megabytes"] = sizes[files[name].name]
        result[name] = best | {"made": made[name]}
        print(
            f"  {name:24} {best['megabytes']:6.1f} {made[name]:5.1f} s {best['ready']:6.2f} s "
            f"{best['drawn']:6.2f} s {best['frame']:5.0f} ms {best['worst']:5.0f} ms"
        )
        for key, goal in GOALS.items():
            verdict = "pass" if best[key] <= goal else "miss"
            print(f"    {key:10} {best[key]:8.2f}   goal {goal:5.1f}   {verdict}")
    write("page", result, in_full(parser, options))


if __name__ == "__main__":
    main()
