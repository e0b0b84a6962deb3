"""What a guard costs a training step, beside torch's anomaly detection.

    python benchmarks/guard.py [--rounds 15]

A 6-layer, 256-wide transformer with 512 tokens a step: forward, loss, backward and a step of
AdamW, bare, with `hookline.guard` around it, with a guard that checks every module, with
`isfinite(...).all()` at every module by hand, and under `torch.autograd.set_detect_anomaly`. All
run in turn, in a new order every round. Writes latest/guard.json.
"""

import argparse

import torch
from latest import in_full, write
from timing import Race, machine
from torch import nn
from torch.nn import functional as F

import hookline as hl

WIDTH, LAYERS, BATCH, LENGTH, WORDS = 256, 6, 4, 128, 1000
GOALS = {"guard": 1.05}


class Transformer(nn.Module):
    """A causal language model; its mask of -inf is a buffer."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, ids):
        x = self.embed(ids) + self.place.weight
        return self.head(self.layers(x, mask=self.mask))


class Trained:
    """A model with its optimiser and one batch; `step` trains it."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = Transformer()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.ids = torch.randint(0, WORDS, (BATCH, LENGTH))
        self.labels = torch.randint(0, WORDS, (BATCH, LENGTH))

    def step(self):
        self.optimizer.zero_grad()
        logits = self.model(self.ids)
        F.cross_entropy(logits.flatten(0, 1), self.labels.flatten()).backward()
        self.optimizer.step()


def by_hand(model):
    """isfinite at every module, as one writes it."""

    def check(module, args, output):
        value = output[0] if isinstance(output, tuple) else output
        if not torch.isfinite(value).all():
            raise ArithmeticError(type(module).__name__)

    for module in model.modules():
        module.register_forward_hook(check)


def variants():
    """The ways to train, by name."""
    bare, guarded, careful, checked, anomaly = (Trained() for _ in range(5))
    hl.guard(guarded.model, to=None).attach()
    hl.guard(careful.model, to=None, careful=True).attach()
    by_hand(checked.model)

    def detecting():
        with torch.autograd.set_detect_anomaly(True):
            anomaly.step()

    return {
        "bare": bare.step,
        "guard": guarded.step,
        "guard(careful=True)": careful.step,
        "isfinite at every module": checked.step,
        "set_detect_anomaly": detecting,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    rounds = options.rounds
    race = Race(variants())
    race.warm_up(2)
    for _ in range(3):
        race.run(max(1, rounds // 3))
    rows = {}
    for name in race.variants:
        fast, median = race.fast(name) / race.fast("bare"), race.median(name) / race.median("bare")
        rows[name] = {
            "ms": race.fast(name) / 1e3, "ratio": fast, "by medians": median,
            "goal": GOALS.get(name),
        }  # fmt: skip
    print(f"{LAYERS} layers, {WIDTH} wide, {BATCH * LENGTH} tokens a step, {race.rounds} rounds\n")
    print(f"{'':26} {'ms a step':>10} {'× bare':>8} {'by medians':>11} {'goal':>7}")
    for name, row in rows.items():
        goal = "" if row["goal"] is None else f"≤ {row['goal']}"
        print(
            f"{name:26} {row['ms']:10.1f} {row['ratio']:8.3f} {row['by medians']:11.3f} {goal:>7}"
        )
    content = {"machine": machine(), "rounds": race.rounds, "variants": rows}
    write("guard", content, in_full(parser, options))


if __name__ == "__main__":
    main()
