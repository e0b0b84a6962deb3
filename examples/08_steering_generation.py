"""Steering: a vector makes a model that writes English go on in French, while a block runs."""

import numpy as np
import torch
from tiny_language_model import SENTENCES, Transformer, learn

import hookline as hl

torch.manual_seed(0)
model = Transformer((word for sentence in SENTENCES for word in sentence), layers=3)
tokens = model.encode(*SENTENCES)
learn(model, lambda: tokens[torch.randperm(len(tokens))[:32]], steps=120)
french = model.encode(*(s for s in SENTENCES if s[1] == "le"))
english = model.encode(*(s for s in SENTENCES if s[1] == "the"))

# The direction from English to French: the difference of the means, at the output of a block.
with torch.no_grad(), hl.capture(model, "blocks.1", at=np.s_[:, 2:-1]) as record:
    model(french)
    model(english)
in_french, in_english = (value.mean((0, 1)) for value in record.calls("blocks.1"))
direction = in_french - in_english

before = model.write("start the dog", 4)
print("as it is:", before)
with hl.edit(model, "blocks.1", hl.add(2 * direction)):
    steered = model.write("start the dog", 4)
print("steered: ", steered)
words = {model.words[n] for n in french.flatten()} - {"start", "end"}
print("French goes on where English began:", words.issuperset(steered.split()[3:-1]))
print("afterwards it is as before:", model.write("start the dog", 4) == before)

# By hand, for one word: the blocks one after the other, with the vector added in between.
with torch.no_grad(), hl.edit(model, "blocks.1", hl.add(2 * direction)):
    logits = model(english)
with torch.no_grad():
    x = model.embed(english) + model.position.weight[: english.shape[1]]
    x = model.blocks[2](model.blocks[:2](x) + 2 * direction)
    by_hand = model.head(model.norm(x))
print("by hand:", torch.allclose(logits, by_hand, atol=1e-5))

# How much of it is needed? A little does nothing.
for strength in (0.5, 1.0, 1.5, 2.0):
    with hl.edit(model, "blocks.1", hl.add(strength * direction)):
        print(f"  {strength} times: {model.write('start the dog', 4)}")

# From the third call on: the first two words are written as usual.
with hl.edit(model, "blocks.1", hl.add(3 * direction), calls=slice(2, None)):
    late = model.write("start the dog", 4)
print("steered late:", late)
print("two words are those of before:", late.split()[:5] == before.split()[:5])
