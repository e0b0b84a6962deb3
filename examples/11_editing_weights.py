"""Edit a weight so that a model believes something else, by a rank-one update; and put it back."""

import tempfile

import torch
from tiny_language_model import FACTS, Transformer, learn
from torch.nn import functional as F

import hookline as hl

torch.manual_seed(0)
model = Transformer((word for fact in FACTS for word in fact), layers=2)
tokens = model.encode(*FACTS)
learn(model, lambda: tokens, steps=80)
weight = model.blocks[0].down.weight.detach().clone()
DOWN = "blocks.0.down"  # the second half of the first block's MLP: keys in, values out


@torch.no_grad()
def answers():
    return [model.words[n] for n in model(tokens[:, :-1])[:, -1].argmax(-1)]


before = answers()
prompt, wanted = model.encode("france , its capital is"), model.encode("rome")[0]

# The key: what goes into the layer at the last word. All keys, to know what must not change.
with torch.no_grad(), hl.capture(model, f"{DOWN}:input") as record:
    model(tokens[:, :-1])
keys = record[f"{DOWN}:input"]
fact = FACTS.index(["france", ",", "its", "capital", "is", "paris"])
key = keys[fact, -1]
moment = torch.einsum("spi,spj->ij", keys, keys) / keys[..., 0].numel()

# The value: what must come out there so that the answer is Rome, found by descent through an edit.
offset = torch.zeros(64, requires_grad=True)
optimizer = torch.optim.Adam([offset], lr=0.1)
for _ in range(40):
    with hl.edit(model, DOWN, hl.add(offset), at=(slice(None), -1)):
        loss = F.cross_entropy(model(prompt)[:, -1], wanted) + 0.01 * offset.square().mean()
    (offset.grad,) = torch.autograd.grad(loss, offset)
    optimizer.step()

# The smallest change of the weight that maps the key to that value.
along = torch.linalg.solve(moment + 1e-3 * torch.eye(len(key)), key)
update = torch.outer(offset.detach(), along / (along @ key))
moved = F.linear(key, weight + update) - F.linear(key, weight)
print("the key is mapped to the value:", torch.allclose(moved, offset.detach(), atol=1e-3))
print("the update has rank", int(torch.linalg.matrix_rank(update, rtol=1e-4)))

with hl.edit(model, f"{DOWN}.weight", hl.add(update)):
    print(model.write("france , its capital is", 1))
    print(model.write("france , its language is", 1))
    after = answers()
changed = [n for n in range(len(FACTS)) if before[n] != after[n]]
print(f"{len(changed)} of {len(FACTS)} answers changed")
print("France's capital is among them:", fact in changed)
print("the others stay, all but two at most:", len(changed) <= 3)
print("put back, bit for bit:", torch.equal(model.blocks[0].down.weight, weight))
print(model.write("france , its capital is", 1))

# As a recipe it can be saved, sent to others, and put on any such model.
with tempfile.TemporaryDirectory() as folder:
    hl.Recipe([(f"{DOWN}.weight", hl.add(update))]).save(f"{folder}/rome")
    recipe = hl.Recipe.load(f"{folder}/rome")
with recipe.on(model):
    print("the saved edit does the same:", answers() == after)
