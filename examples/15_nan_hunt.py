"""The loss is NaN: `guard` names what made it, and `replay` runs that again without the model."""

import tempfile

import torch
from torch import nn
from torch.nn import functional as F

import hookline as hl


class Pooling(nn.Module):
    """The mean of the tokens that are not padding."""

    def forward(self, x, mask):
        return (x * mask).sum(1) / mask.sum(1)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.pool, self.head = nn.Embedding(20, 16), Pooling(), nn.Linear(16, 2)

    def forward(self, tokens):
        mask = (tokens != 0).unsqueeze(-1).float()
        return self.head(self.pool(self.embed(tokens), mask))


torch.manual_seed(0)
tokens = torch.randint(1, 20, (640, 6))
tokens[400] = 0  # one text of 640 is empty
labels = (tokens.sum(1) > 60).long()


def train(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in zip(tokens.split(32), labels.split(32), strict=True):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


bare = Reader()
train(bare)
print("without a guard, weights are lost:", bool(bare.head.weight.isnan().any()))

# With a guard, training stops in the step that made it, before the weights are touched.
folder, guarded = tempfile.mkdtemp(), Reader()
try:
    with hl.guard(guarded, to=folder):
        train(guarded)
except hl.NonFiniteError as error:
    fault = error.fault
    print(error)
print("the place:", fault.place)
print("the batch with the empty text:", fault.step == 400 // 32)
print("weights are good:", bool(guarded.head.weight.isfinite().all()))

# What the operation was given lies on the disk: look at it anywhere.
again = hl.replay(fault.folder)
print(again)
total, count = again.inputs["args"]
print("the sample at fault:", int((count == 0).nonzero()[0, 0]) == 400 % 32)
print("by hand, the same again:", bool((total / count)[400 % 32].isnan().all()))


# Mended, nothing is found any more.
class Mended(nn.Module):
    def forward(self, x, mask):
        return (x * mask).sum(1) / mask.sum(1).clamp(min=1)


guarded.pool = Mended()
with hl.guard(guarded):
    train(guarded)
print("trained to the end:", bool(guarded.head.weight.isfinite().all()))
