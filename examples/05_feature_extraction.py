"""Features of a trained network, without running what comes after them."""

import digit_reader
import torch

import hookline as hl

torch.manual_seed(0)
known, unseen = digit_reader.load_digits()
model = digit_reader.train(digit_reader.make_model(), known, epochs=4)


def features(images, place):
    """What stands at a place, and no more is computed: the forward stops there."""
    with torch.no_grad(), hl.capture(model, place, stop=True) as record:
        model(images)
    return record[place].flatten(1)


# The modules behind the place are not called.
called = []
with hl.hook(model, "*", lambda value, call: called.append(call.place)):
    found = features(unseen.images, "relu1")
print("called:", ", ".join(called))
print("the first layers by hand:", torch.equal(found, model[:2](unseen.images).flatten(1)))


# How good are they? Read digits by the nearest mean of three examples of each.
def read_from(place):
    examples = torch.cat([(known.labels == digit).nonzero()[:3, 0] for digit in range(10)])
    means = features(known.images[examples], place).unflatten(0, (10, 3)).mean(1)
    nearest = torch.cdist(features(unseen.images, place), means).argmin(1)
    return (nearest == unseen.labels).float().mean().item()


scores = {place: read_from(place) for place in ("conv1", "relu1", "relu2", "pool", "fc")}
for place, score in scores.items():
    print(f"  from {place}: {score:.0%} of the digits")
print("far better than by chance:", min(scores.values()) > 0.5)

# Over a whole data set, onto the disk: see 17_harvest_ranks.py. In memory, batch by batch:
batches = [features(batch, "pool") for batch in unseen.images.split(100)]
print("all of them:", tuple(torch.cat(batches).shape))
