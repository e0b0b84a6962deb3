"""Look: the values that pass through a network, and the gradients that come back."""

import torch
from torch import nn

import hookline as hl

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
x = torch.randn(3, 4)

# Values that require grad are kept attached, so that they can be used in a loss.
with hl.capture(model, "2:input", "2:grad_output", "**.weight:grad") as record:
    model(x).square().mean().backward()
print(record)

# Snapshots stay as they were: the in-place ReLU does not change what was captured of layer 0.
with hl.capture(model, "0", "1", detach=True) as record:
    model(x)
print("layer 0 is below zero somewhere:", bool((record["0"] < 0).any()))
print("layer 1 is its ReLU:", torch.equal(record["0"].relu(), record["1"]))

# A feature extractor: the forward ends as soon as the places have fired.
with torch.no_grad(), hl.capture(model, "1", stop=True) as record:
    model(x)
print("features:", tuple(record["1"].shape))
