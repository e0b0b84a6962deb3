"""Losses on activations: a network with few active units, and one that imitates another."""

import digit_reader
import torch
from torch.nn import functional as F

import hookline as hl


def train(model, digits, place, cost, steps=150):
    """The usual loss, plus a cost of what stands at a place."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for _ in range(steps):
        chosen = torch.randperm(len(digits.labels))[:128]
        with hl.capture(model, place) as record:
            logits = model(digits.images[chosen])
        loss = F.cross_entropy(logits, digits.labels[chosen])
        (loss + cost(record[place], chosen)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def active(model, digits):
    with torch.no_grad(), hl.capture(model, "pool") as record:
        model(digits.images)
    return (record["pool"] > 0.01).float().mean().item()


torch.manual_seed(0)
known, unseen = digit_reader.load_digits()

# A captured value is attached to its graph, so that it can stand in a loss. By hand:
model = digit_reader.make_model()
with hl.capture(model, "pool") as record:
    model(unseen.images)
(gradient,) = torch.autograd.grad(record["pool"].abs().mean(), model.conv1.weight)
(by_hand,) = torch.autograd.grad(model[:5](unseen.images).abs().mean(), model.conv1.weight)
print("the gradient of a captured value is the true one:", torch.allclose(gradient, by_hand))

# A cost of being active: most units fall silent, and the digits are read all the same.
torch.manual_seed(1)
plain = train(digit_reader.make_model(), known, "pool", lambda value, chosen: 0.0)
torch.manual_seed(1)
sparse = train(
    digit_reader.make_model(), known, "pool", lambda value, chosen: 0.5 * value.abs().mean()
)
for name, model in (("plain", plain), ("sparse", sparse)):
    share, right = active(model, unseen), digit_reader.accuracy(model, unseen)
    print(f"  {name}: {share:.0%} of the units active, {right} of the digits read")
print("fewer units are active:", active(sparse, unseen) < 0.7 * active(plain, unseen))

# A cost of being unlike another network: a student gets its teacher's features.
with torch.no_grad(), hl.capture(plain, "pool") as teacher:
    plain(known.images)
student = train(
    digit_reader.make_model(), known, "pool",
    lambda value, chosen: F.mse_loss(value, teacher["pool"][chosen]),
)  # fmt: skip


def likeness(model):
    with torch.no_grad(), hl.capture(model, "pool") as own, hl.capture(plain, "pool") as teacher:
        model(unseen.images)
        plain(unseen.images)
    return F.cosine_similarity(own["pool"].flatten(1), teacher["pool"].flatten(1)).mean().item()


print(f"  like the teacher: student {likeness(student):.2f}, other {likeness(sparse):.2f}")
print("the student is more like it:", likeness(student) > likeness(sparse))
