"""Which handwritten digits excite each channel of a network most?"""

import digit_reader
import torch

import hookline as hl

torch.manual_seed(0)
known, unseen = digit_reader.load_digits()
model = digit_reader.train(digit_reader.make_model(), known, epochs=4)

# One pass over the data; of each channel only the top nine are kept, with sample and position.
found = hl.measure(model, "relu2", statistics=[hl.TopK(k=9, dim=1)], data=known.images.split(100))
values, samples, positions = found["relu2"]["topk"]
print("k × channels:", tuple(values.shape), "and where:", tuple(positions.shape))

for channel in range(values.shape[1]):
    digits = known.labels[samples[:, channel]].tolist()
    print(f"  channel {channel}: digits {digits}, up to {values[0, channel]:.2f}")

# By hand, with everything in memory at once.
with torch.no_grad():
    everything = model[:4](known.images)
largest = everything.flatten(2).amax(2).amax(0)
print("these are the largest:", torch.allclose(values[0], largest.double()))
row, column = positions[0, 0]
there = everything[samples[0, 0], 0, row, column]
print("and they stand where it says:", there.item() == values[0, 0].item())

# A channel of the last layer stands for a digit: its top samples show that digit.
found = hl.measure(model, "fc", statistics=[hl.TopK(k=9)], data=known.images.split(100))
shown = known.labels[found["fc"]["topk"].ids]
right = (shown == torch.arange(10)).float().mean().item()
print(f"{right:.0%} of the top samples of the outputs show their digit")
print("nearly all of them:", right > 0.95)
