"""Heads: which of them make a transformer play on a melody that it has heard once, and how?"""

import torch
from tiny_language_model import melodies, musician
from torch.nn import functional as F

import hookline as hl

model, PERIOD, HEADS = musician(), 7, 4
torch.manual_seed(1)
tokens = melodies(100, PERIOD)


@torch.no_grad()
def surprise():
    """The loss on notes that can be known, since the melody has begun again."""
    logits = model(tokens[:, :-1])[:, PERIOD:]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, PERIOD + 1 :].flatten()).item()


before = surprise()
print(f"surprise: {before:.3f}; by chance it would be {torch.tensor(28.0).log():.1f}")

# The heads lie side by side at the input of the projection behind them.
effects = torch.zeros(2, HEADS)
for block in range(2):
    place = f"blocks.{block}.attention.out:input"
    for head in range(HEADS):
        with hl.edit(model, place, hl.zero(), at=hl.heads(head, of=HEADS)):
            effects[block, head] = surprise() - before
    with hl.edit(model, place, hl.zero()):
        whole = surprise() - before
    without = ", ".join(f"{effect:+.2f}" for effect in effects[block])
    print(f"  block {block}, without a head: {without}; without all of them: {whole:+.2f}")
print("one head of block 0 counts most:", int(effects.argmax()) < HEADS)
print("those of block 1 stand in for each other:", bool(effects[1].max() < 0.1 * whole))

# By hand: the projection without the columns of a head.
head = int(effects[0].argmax())
with hl.preserve(model, "blocks.0.attention.out"), torch.no_grad():
    model.blocks[0].attention.out.weight.unflatten(1, (HEADS, -1))[:, head] = 0
    by_hand = surprise() - before
print("by hand:", abs(by_hand - effects[0, head].item()) < 1e-4)

# What the heads look at, computed from what went into the fast kernel.
with torch.no_grad(), hl.attention(model, "blocks.*.attention") as patterns:
    model(tokens)
first, again = torch.arange(1, PERIOD), torch.arange(PERIOD, 15)
previous = patterns["blocks.0.attention"].mean(0)[:, first, first - 1].mean(1)
followed = patterns["blocks.1.attention"].mean(0)[:, again, again - PERIOD + 1].mean(1)
print("  block 0, at the note before:", ", ".join(f"{share:.0%}" for share in previous))
print("  block 1, at what followed this note:", ", ".join(f"{share:.0%}" for share in followed))
print("the head that counts most looks at the note before:", head == int(previous.argmax()))
print("all of block 1 look at what followed:", bool((followed > 0.5).all()))
