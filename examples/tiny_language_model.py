"""A small transformer and three little languages, learned in seconds; some examples share it.

- `Transformer(words)`: reads and writes texts of these words
- `learn(model, batches, steps)`: train it to say the next word
- `FACTS`, `SENTENCES`, `melodies(count)`: what it can learn
- `musician()`: a transformer that has learned to go on with any melody
"""

from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

COUNTRIES = """
france paris french cheese; italy rome italian pasta; spain madrid spanish paella;
japan tokyo japanese sushi; greece athens greek olives; norway oslo norwegian salmon;
egypt cairo arabic beans; brazil brasilia portuguese rice; germany berlin german bread;
poland warsaw polish dumplings; turkey ankara turkish kebab; korea seoul korean kimchi
"""
FACTS = [
    f"{country} , its {relation} is {answer}".split()
    for country, *answers in (line.split() for line in COUNTRIES.split(";"))
    for relation, answer in zip(("capital", "language", "food"), answers, strict=True)
]

NOUNS = [("dog", "chien"), ("cat", "chat"), ("boy", "garçon"), ("bread", "pain"), ("wine", "vin")]
VERBS = [("sees", "voit"), ("wants", "veut"), ("loves", "aime"), ("finds", "trouve")]
SENTENCES = [
    ["start", the, noun[which], verb[which], the, other[which], "end"]
    for which, the in enumerate(("the", "le"))
    for noun in NOUNS
    for verb in VERBS
    for other in NOUNS
    if noun != other
]

NOTES = [f"{note}{octave}" for octave in range(1, 5) for note in "cdefgah"]


def melodies(count, period=None, length=16):
    """Random melodies of 3 to 8 notes, played again and again."""
    notes = torch.rand(count, len(NOTES)).argsort(1)
    periods = torch.randint(3, 9, (count, 1)) if period is None else torch.tensor([[period]])
    return notes.gather(1, (torch.arange(length) % periods).expand(count, -1))


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.up, self.down = (
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        )  # fmt: skip

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, words, width=64, heads=4, layers=2, length=20):
        super().__init__()
        self.words = list(dict.fromkeys(words))
        self.embed = nn.Embedding(len(self.words), width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(self.words), bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def encode(self, *texts):
        """Tokens of texts of the same length."""
        lists = [text.split() if isinstance(text, str) else text for text in texts]
        return torch.tensor([[self.words.index(word) for word in words] for words in lists])

    @torch.no_grad()
    def write(self, text, count):
        """A text with the most likely words behind it."""
        tokens = self.encode(text)
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return " ".join(self.words[n] for n in tokens[0])


def learn(model, batches, steps, rate=0.01):
    """Train a model to say the next word; `batches()` gives tokens, batch × position."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for _ in range(steps):
        tokens = batches()
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


@cache
def musician():
    """A transformer that has learned to go on with any melody."""
    torch.manual_seed(0)
    model = Transformer(NOTES, width=32, heads=4, layers=2)
    return learn(model, lambda: melodies(32), steps=500)
