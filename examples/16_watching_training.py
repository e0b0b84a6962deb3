"""Watch a training: statistics at every place, and in plain words what is wrong with it."""

import tempfile

import digit_reader
import torch
from torch import nn
from torch.nn import functional as F

import hookline as hl

torch.manual_seed(0)
known, unseen = digit_reader.load_digits()


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def train(model, folder, rate=0.1, steps=100):
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with hl.watch(model, every=5, optimizer=optimizer, to=folder) as watching:
        for _ in range(steps):
            chosen = torch.randperm(len(known.labels))[:128]
            loss = F.cross_entropy(model(known.images[chosen]), known.labels[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watching.log(loss=loss.item())
    return watching


# A mistake: biases that are far too low, so that most units of a layer never speak.
ill, folder = make_model(), tempfile.mkdtemp()
with torch.no_grad():
    ill[3].bias[:48] = -5.0
watching = train(ill, f"{folder}/ill")
for finding in watching.findings():
    print(f"  {finding.kind} at {finding.place!r}, step {finding.step}: {finding.message}")
    print(f"    {finding.advice}")
(found,) = watching.findings()
print("it is found where it is:", (found.kind, found.place) == ("dead units", "4"))

# By hand: units that are zero for every digit.
dead = (ill[:5](known.images) == 0).all(0).sum().item()
print(f"{dead} of 64 units are dead:", dead >= 48)

# What is written can be read while the training goes on, and by other programs.
run = hl.Run(f"{folder}/ill")
steps, losses = run.scalars("loss")
_, silent = run.series("4", statistic="dead")
print(f"loss from {losses[0]:.2f} to {losses[-1]:.2f} in {len(steps)} steps")
print(f"dead from the first step on: {silent.min() >= 0.7}")

# Mended, nothing is found, and more is learned.
well = make_model()
print("findings after mending:", train(well, f"{folder}/well").findings())
with torch.no_grad():
    right = [(m(unseen.images).argmax(1) == unseen.labels).float().mean() for m in (ill, well)]
print(f"digits read: {right[0]:.0%} and {right[1]:.0%}")
print("mended, it learns more:", bool(right[1] > right[0]))
