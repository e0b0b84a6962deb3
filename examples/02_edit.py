"""Change: activations, gradients and weights, for as long as a block runs."""

import torch
from torch import nn

import hookline as hl

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten())
x = torch.randn(2, 1, 8, 8)
before = model(x)

with hl.edit(model, nn.Conv2d, hl.dropout(0.5, channels=True)):  # after every convolution
    print("dropout changes the result:", not torch.equal(model(x), before))

with hl.capture(model, "2") as clean:
    model(x)
with hl.edit(model, "2", hl.patch(clean)):  # what another run had there
    print("patched, other images give the same:", torch.equal(model(x * 0), before))

with hl.edit(model, "0.bias:grad", hl.zero()):  # a gradient, before it is accumulated
    model(x).sum().backward()
print("the bias gets no gradient:", not model[0].bias.grad.any())

with hl.edit(model, "**.weight", hl.zero()):  # weights, swapped in and back
    print("without weights, every image looks the same:", torch.equal(model(x)[0], model(x)[1]))
print("as before, bit for bit:", torch.equal(model(x), before))
