"""Activation patching: at which layer and note does a transformer hold what it will say next?

It has learned to go on with melodies: after `… c d e … c d` comes `e`.
"""

import torch
from tiny_language_model import melodies, musician

import hookline as hl

model = musician()

# Two melodies of seven notes that differ in one of them. They break off before it comes again.
torch.manual_seed(1)
clean = melodies(1, period=7)[:, :10]
corrupt = clean.clone()
corrupt[0, 3] = next(n for n in range(len(model.words)) if n not in clean)
right, wrong = clean[0, 3], corrupt[0, 3]
print("clean:  ", " ".join(model.words[n] for n in clean[0]), "…", model.words[right])
print("corrupt:", " ".join(model.words[n] for n in corrupt[0]), "…", model.words[wrong])


def lead(logits):
    """How far the clean melody's note is ahead of the other's."""
    return (logits[:, -1, right] - logits[:, -1, wrong]).sum()


# Run on the corrupt melody, with one value at a time as it was in the clean run.
found = hl.sweep(model, clean, corrupt, "blocks.*", lead, positions="all", progress=False)
print(f"lead: {found.clean:+.1f} on the clean melody, {found.corrupt:+.1f} on the corrupt one")
print("share of the way back, blocks × notes:")
for place, row in zip(found.places, found.shares, strict=True):
    print(f"  {place}:", " ".join(f"{share:5.2f}" for share in row))
print("after block 0, the note itself holds it:", int(found.shares[0].argmax()) == 3)
print("after block 1, the last note holds it:", int(found.shares[1].argmax()) == 9)

# One of these numbers by hand: an edit that puts in a slice of what the other run had.
with torch.no_grad(), hl.capture(model, "blocks.0") as record:
    model(clean)
with torch.no_grad(), hl.edit(model, "blocks.0", hl.patch(record), at=(slice(None), 3)):
    by_hand = lead(model(corrupt)).item()
print("by hand:", abs(by_hand - found["blocks.0", 3].value) < 1e-4)

# All at once, estimated from one backward: cheap, and good for a first look.
guess = hl.sweep(model, clean, corrupt, "blocks.*", lead, positions="all", approximate=True)
print("the estimate finds the same notes:", guess.matrix.argmax(1).tolist() == [3, 9])
