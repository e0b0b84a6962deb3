"""bfloat16 against float32: where do the two part, and what must stay in float32?"""

import copy

import torch
from torch import nn

import hookline as hl


class Spread(nn.Module):
    """Features divided by their spread, with the formula that cancels: E[x²] − E[x]²."""

    def forward(self, x):
        spread = x.square().mean(-1, keepdim=True) - x.mean(-1, keepdim=True).square()
        return (x - x.mean(-1, keepdim=True)) / (spread.clamp(min=0) + 1e-3).sqrt()


class InFloat32(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.float()).to(x.dtype)


def block():
    return nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))


torch.manual_seed(0)
model = nn.Sequential(block(), block(), Spread(), block(), nn.Linear(32, 4)).eval()
nn.init.constant_(model[1][2].bias, 4.0)  # a large mean, a small spread
x = torch.randn(64, 32)

half = copy.deepcopy(model).bfloat16()
found = hl.compare(model, half, x, batch_b=x.bfloat16())
print(found)
print("they part at the spread:", found.first.place == "2")

# By hand, at one place.
with torch.no_grad(), hl.capture(model, "2") as a, hl.capture(half, "2") as b:
    model(x)
    half(x.bfloat16())
error = (a["2"] - b["2"].float()).norm() / a["2"].norm()
print("the same by hand:", abs(float(error) - found["2"].relative) < 1e-3)

# This module alone in float32, the rest as it was.
with hl.replace_module(half, "2", InFloat32(half[2])):
    again = hl.compare(model, half, x, batch_b=x.bfloat16())
before, after = found[""].relative, again[""].relative
print(f"relative error of the output: {before:.2f} before, {after:.2f} after")
print("far closer:", after < 0.2 * before)
print("put back:", isinstance(half[2], Spread))
