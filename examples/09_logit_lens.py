"""The logit lens: what each block would say if it were the last one."""

import torch
from tiny_language_model import melodies, musician

import hookline as hl

model = musician()
torch.manual_seed(1)
tokens = melodies(100, period=7)
with torch.no_grad(), hl.capture(model, "blocks.0:input", "blocks.*") as record:
    logits = model(tokens)

# The last norm and the head turn any of these values into notes.
with torch.no_grad():
    lens = {place: model.head(model.norm(value)) for place, value in record.items()}
print("for the last block it is the model's answer:", torch.equal(lens["blocks.1"], logits))

# One melody. It is known from the seventh note on, since it begins again there.
print("played:", " ".join(f"{model.words[n]:>3}" for n in tokens[0]))
for place, seen in lens.items():
    said = ["", *(model.words[n] for n in seen[0, :-1].argmax(-1))]
    print(f"  {place:>14}:", " ".join(f"{note:>3}" for note in said))

# All melodies: how often the right note comes first, when it can be known.
known = {
    place: (seen[:, 7:-1].argmax(-1) == tokens[:, 8:]).float().mean().item()
    for place, seen in lens.items()
}
for place, share in known.items():
    print(f"  {place}: {share:.0%} of the notes")
print("the last block brings them:", known["blocks.0"] < 0.5 < 0.95 < known["blocks.1"])
