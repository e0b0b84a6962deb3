"""Dropout after every convolution of a network that has none; its size, and the work of each layer.

docs/recipes/dropout-everywhere.md goes through it step by step.
"""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import hookline as hl


class Block(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Conv2d(channels, out, 1, stride, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2))
        self.fc = nn.Linear(32, 10)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


torch.manual_seed(0)
model, images = ResNet().eval(), torch.randn(4, 3, 32, 32)
bare = model(images)

# A type stands for every module of that type. The change follows each module's own mode.
with hl.edit(model, nn.Conv2d, hl.dropout(0.5, channels=True)):
    print("eval mode, nothing is dropped:", torch.equal(model(images), bare))
    model.train()
    with hl.capture(model, nn.Conv2d, detach=True) as record:
        model(images).sum().backward()  # the in-place ReLUs are no trouble
    model.eval()
for place, value in record.items():
    dropped = (value == 0).all(dim=(2, 3)).float().mean()
    print(f"  train mode, {place}: {dropped:.0%} of the channels dropped")

# Dropout in eval mode, too: how much the answers vary says how sure the model is.
always = hl.dropout(0.1, channels=True, training=True)
with torch.no_grad(), hl.edit(model, nn.Conv2d, always):
    runs = torch.stack([model(images) for _ in range(10)])
print("eval mode, dropping all the same, runs differ:", bool((runs.std(0) > 0).all()))
print("left on the model:", hl.attached(model))

# Size: the weights lie in the model; what the layers pass on is known when it runs.
with torch.no_grad(), hl.capture(model, nn.Conv2d, nn.Linear) as record:
    model(images[:1])
print(f"{sum(p.numel() for p in model.parameters()):,} weights")
print(f"{record.nbytes:,} bytes of outputs an image")

# Operations: each number of an output takes one multiplication and one addition a weight.
operations = {
    place: 2 * output.numel() * hl.get_module(model, place).weight[0].numel()
    for place, output in record.items()
}
for place, count in operations.items():
    print(f"  {place}: {count:,} operations")
with torch.no_grad(), FlopCounterMode(display=False) as counter:
    model(images[:1])
print("torch counts as many:", counter.get_total_flops() == sum(operations.values()))
