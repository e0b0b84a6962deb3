"""Gradients: look at them along the layers, find where they vanish, change them on their way."""

import torch
from torch import nn

import hookline as hl

torch.manual_seed(0)
layers = [layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Sigmoid())]
model = nn.Sequential(*layers, nn.Linear(16, 1))
x = torch.randn(32, 16)

# Gradients have addresses, as values have. Those of a module follow its output and its input.
with hl.capture(model, "*:grad_output", "16:grad_input", "0.weight:grad") as record:
    loss = model(x).square().mean()
    loss.backward()
print("a weight's is its .grad:", torch.equal(record["0.weight:grad"], model[0].weight.grad))

# The same by hand: cut the network before its last layer.
hidden = model[:16](x).detach().requires_grad_()
(by_hand,) = torch.autograd.grad(model[16](hidden).square().mean(), hidden)
print("what goes back into the last layer:", torch.allclose(record["16:grad_input"], by_hand))

for place in ("0", "4", "8", "12", "16"):
    print(f"  gradient at layer {place:>2}: {record[f'{place}:grad_output'].norm():.1e}")
first, last = record["0:grad_output"].norm(), record["16:grad_output"].norm()
print("they vanish on the way through the sigmoids:", bool(first < 1e-4 * last))

# Change them: a clamp here, a reversal there (the layers below then learn the opposite).
model.zero_grad()
with hl.edit(model, "8:grad_output", hl.scale(-1.0)):
    model(x).square().mean().backward()
reversed_below = torch.allclose(model[0].weight.grad, -record["0.weight:grad"])
print("reversed below layer 8:", reversed_below)

# A gradient of a captured value: it is kept attached, so that autograd knows it.
with hl.capture(model, "7") as record:
    loss = model(x).square().mean()
(gradient,) = torch.autograd.grad(loss, record["7"])
print("autograd knows captured values:", gradient.shape == record["7"].shape)
