"""Findings: trainings with a seeded illness are told of, healthy ones pass in silence."""

import math

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import hookline as hl
from hookline.training.findings import Finding, Findings


def digits():
    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32) / 16
    return (x - x.mean()) / x.std(), torch.tensor(data.target)


X, Y = digits()


def train_watched(
    model, steps=80, optimizer=None, every=5, data=None, size=64, shape=(64,), **options
):
    """Train on the digits, watched; gives the watch and the losses."""
    torch.manual_seed(1)
    x, y = (X, Y) if data is None else data
    optimizer = optimizer or torch.optim.Adam(model.parameters(), 1e-3)
    losses = []
    with hl.watch(model, every=every, optimizer=optimizer, **options) as watching:
        for _ in range(steps):
            pick = torch.randint(0, len(x), (size,))
            loss = F.cross_entropy(model(x[pick].reshape(-1, *shape)), y[pick])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return watching, losses


def digit_mlp(act=nn.ReLU, width=64, depth=3):
    torch.manual_seed(0)
    layers = [nn.Linear(64, width), act()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), act()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 10),
    )  # fmt: skip


class Transformer(nn.Module):
    """Reads the rows of an image as tokens."""

    def __init__(self, norm_first=True):
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.position = nn.Embedding(8, 32)
        layer = nn.TransformerEncoderLayer(
            32, 4, 64, dropout=0.1, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        h = self.embed(x) + self.position(torch.arange(8))
        return self.head(self.norm(self.encoder(h)).mean(1))


def kinds_found(watching):
    return {finding.kind for finding in watching.findings()}


def one(watching, kind):
    """The first finding of a kind; it must have been told, and be complete."""
    found = [finding for finding in watching.findings() if finding.kind == kind]
    assert found, [str(finding) for finding in watching.findings()]
    first = found[0]
    assert first.message.endswith(".")
    assert first.advice.endswith(".")
    assert first.evidence
    assert 0 <= first.step < watching.steps
    return first


def sure():
    """A sigmoid that ends the model, and is the first that its class makes."""

    class Sure(nn.Module):
        def __init__(self):
            super().__init__()
            self.sigmoid, self.act = nn.Sigmoid(), nn.ReLU()
            self.first, self.last = nn.Linear(64, 32), nn.Linear(32, 10)

        def forward(self, x):
            return self.sigmoid(99 * self.last(self.act(self.first(x))))

    torch.manual_seed(0)
    return Sure()


# -- healthy trainings -----------------------------------------------------------------------------

HEALTHY = {
    "mlp": (digit_mlp, {}, {}),
    "mlp, SGD": (digit_mlp, {"lr": 0.1, "momentum": 0.9, "kind": torch.optim.SGD}, {}),
    "mlp, every step": (digit_mlp, {}, {"every": 1, "steps": 50}),
    "mlp, small batches": (digit_mlp, {}, {"every": 1, "size": 8, "steps": 120}),
    "mlp, trained to the end": (digit_mlp, {"lr": 3e-3}, {"steps": 200, "every": 10}),
    "mlp with tanh": (lambda: digit_mlp(nn.Tanh), {}, {}),
    "mlp with sigmoid": (lambda: digit_mlp(nn.Sigmoid, depth=2), {"lr": 1e-2}, {}),
    "mlp with gelu": (lambda: digit_mlp(nn.GELU), {}, {}),
    "cnn with BatchNorm": (cnn, {}, {"shape": (1, 8, 8)}),
    "cnn, SGD": (cnn, {"lr": 0.05, "kind": torch.optim.SGD}, {"shape": (1, 8, 8)}),
    "transformer": (Transformer, {}, {"shape": (8, 8), "steps": 50}),
    "transformer, norm last": (lambda: Transformer(False), {}, {"shape": (8, 8), "steps": 50}),
    "transformer, AdamW": (
        Transformer, {"kind": torch.optim.AdamW, "weight_decay": 0.1},
        {"shape": (8, 8), "steps": 50},
    ),
}  # fmt: skip


SLOW = {
    "mlp, every step", "mlp, trained to the end", "mlp with gelu", "cnn, SGD",
    "transformer, norm last", "transformer, AdamW",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in HEALTHY]
)
def test_a_healthy_training_has_no_finding(name):
    make, settings, options = HEALTHY[name]
    torch.manual_seed(0)
    model = make()
    settings = {"kind": torch.optim.Adam, "lr": 1e-3} | settings
    optimizer = settings.pop("kind")(model.parameters(), **settings)
    watching, losses = train_watched(model, optimizer=optimizer, **options)
    assert watching.findings() == []
    start, end = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    assert end < 0.85 * start, "it should have learned something"


def test_layers_that_begin_with_zeros_are_no_finding():
    class Zeroed(nn.Module):
        """A branch whose last layer begins at zero, and a scale that does."""

        def __init__(self):
            super().__init__()
            self.first, self.a, self.b = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 32)
            nn.init.zeros_(self.b.weight)
            nn.init.zeros_(self.b.bias)
            self.gain = nn.Parameter(torch.zeros(()))
            self.last = nn.Linear(32, 10)

        def forward(self, x):
            h = self.first(x)
            h = h + self.b(self.a(h).relu())
            return self.last(h + self.gain * h.square())

    torch.manual_seed(0)
    watching, _ = train_watched(Zeroed(), every=1, steps=40)
    assert watching.findings() == []


def test_layers_of_zeros_behind_one_another_are_no_finding_while_the_rate_is_warmed_up():
    class Zeroed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.branch = nn.Linear(64, 32), nn.Linear(32, 32)
            self.inner, self.last = nn.Linear(32, 32), nn.Linear(32, 10)
            for layer in (self.inner, self.last):
                nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)

        def forward(self, x):
            x = self.first(x)
            return self.last(x + self.inner(F.gelu(self.branch(x))))

    torch.manual_seed(0)
    model = Zeroed()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 50))
    with hl.watch(model, every=1, optimizer=optimizer) as watching:
        for step in range(20):
            F.cross_entropy(model(X[step * 64 :][:64]), Y[step * 64 :][:64]).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    assert watching.findings() == []


def test_keys_that_pad_are_not_dead_units_of_a_softmax():
    class Patterns(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Linear(8, 8)

        def forward(self, x):
            scores = self.query(x) @ x.transpose(1, 2)
            return scores.masked_fill(torch.arange(8) >= 4, -torch.inf).softmax(-1)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.patterns, self.last = Patterns(), nn.Linear(8, 10)

        def forward(self, x):
            return self.last((self.patterns(x) @ x).mean(1))

    watching, _ = train_watched(Net(), 20, every=2, shape=(8, 8))
    assert watching.last["patterns", "output"]["dead"] == 0.5
    assert watching.findings() == []


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10])
def test_a_healthy_bert_of_one_segment_has_no_finding(every):
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=256, max_position_embeddings=32,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-4)
    with hl.watch(model, every=every, optimizer=optimizer) as watching:
        for _ in range(60):
            ids = torch.randint(0, 50, (32, 12))
            loss = model(input_ids=ids, labels=ids[:, 0] % 2).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert watching.findings() == []
    assert loss < 0.1


def test_an_embedding_that_is_given_one_id_is_no_finding():
    class Segments(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.segment = nn.Linear(64, 32), nn.Embedding(2, 32)
            self.last = nn.Linear(32, 10)

        def forward(self, x):
            ids = torch.zeros(len(x), dtype=torch.long)
            return self.last((self.embed(x) + self.segment(ids)).relu())

    torch.manual_seed(0)
    watching, _ = train_watched(Segments(), every=1, steps=20)
    assert watching.last["segment", "output"]["spread"] == 0
    assert watching.findings() == []


class Branched(nn.Module):
    """A branch whose gradients are far smaller than those before and after it."""

    def __init__(self, share):
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 10)
        self.share = share

    def forward(self, x):
        h = self.first(x)
        return self.last(h + self.share * self.branch(h))


def test_small_gradients_that_grow_again_before_are_no_vanishing_gradient():
    torch.manual_seed(0)
    watching, _ = train_watched(Branched(1e-6), every=1, steps=20)
    assert watching.findings() == []


def test_a_gradient_that_is_lost_in_a_branch_is_found():
    torch.manual_seed(0)
    watching, _ = train_watched(Branched(1e-10), every=1, steps=20)
    assert one(watching, "vanishing gradient").place == "branch.weight"


class GatedResiduals(nn.Module):
    """Branches that begin with nothing, each multiplied by a number that is learned."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(64, 32)
        self.branches = nn.ModuleList(
            [nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(3)]
        )
        self.gains = nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        h = self.stem(x)
        for gain, branch in zip(self.gains, self.branches, strict=True):
            h = h + gain * branch(h)
        return self.head(h)


def test_branches_that_begin_small_are_no_exploding_gradient():
    model = GatedResiduals()
    watching, losses = train_watched(model, 20, torch.optim.Adam(model.parameters(), 1e-5), every=1)
    assert losses[-1] < losses[0]
    assert watching.findings() == []


class ExpertsInTurn(nn.Module):
    """Two layers that take turns, as experts do of which one is chosen."""

    def __init__(self, turns):
        super().__init__()
        self.experts, self.turns = nn.ModuleList([nn.Linear(64, 10), nn.Linear(64, 10)]), turns

    def forward(self, x):
        return self.experts[next(self.turns)](x)


def test_an_expert_that_is_not_used_for_a_while_is_no_finding():
    turns = iter([0, 1, *[0] * 10, *[1] * 10])
    watching, _ = train_watched(ExpertsInTurn(turns), 22, every=1)
    assert watching.findings() == []


@pytest.mark.parametrize("every", [1, 5])
def test_an_expert_that_is_used_rarely_is_no_finding(every):
    """At every fifth step, when nothing is measured, or first after a while."""
    turns = (
        [step % 5 == 2 for step in range(60)] if every == 5 else [step > 15 for step in range(60)]
    )
    watching, _ = train_watched(ExpertsInTurn(iter(map(int, turns))), 60, every=every)
    assert watching.findings() == []


class Mixture(nn.Module):
    """Experts of which each token has one; those without a token are called with none."""

    def __init__(self, chosen, first=False):
        super().__init__()
        torch.manual_seed(0)
        if first:  # in the order of the model
            self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.embed, self.head = nn.Linear(64, 16), nn.Linear(16, 10)
        if not first:
            self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.chosen = chosen

    def forward(self, x):
        x = self.embed(x)
        for expert, share in zip(self.experts, next(self.chosen), strict=True):
            some = torch.arange(int(share * len(x)))
            x = x.index_add(0, some, expert(x[some]))
        return self.head(x)


@pytest.mark.parametrize("first", [False, True])
def test_an_expert_that_was_given_no_token_for_a_while_has_no_vanishing_gradient(first):
    chosen = [(step % 8 == 4, 1, step % 8 == 5, step > 15) for step in range(60)]
    watching, _ = train_watched(Mixture(iter(chosen), first), 60, every=1)
    assert watching.findings() == []


def test_an_expert_that_is_never_given_a_token_is_found():
    watching, _ = train_watched(Mixture(iter([(1, 1, 0, 1)] * 30)), 30, every=1)
    finding = one(watching, "vanishing gradient")
    assert finding.place == "experts.2.weight"
    assert "never chosen" in finding.advice


def test_a_loss_that_is_zero_at_first_is_no_exploding_gradient():
    """As of a reward that has not come yet."""
    model = digit_mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with hl.watch(model, every=1, optimizer=optimizer) as watching:
        for step in range(20):
            (F.cross_entropy(model(X[:64]), Y[:64]) * (step > 5)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert watching.findings() == []


def test_a_training_that_is_over_is_no_finding():
    """Gradients are there, but so small that float32 loses what they change, but for a zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model, every=1, optimizer=optimizer) as watching:
        for step in range(10):
            if step == 3:
                optimizer.param_groups[0]["lr"] = 1e-10
                nn.init.zeros_(model[2].weight[0, :1])
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert watching.last["0.weight", "update"]["ratio"] == 0
    assert 0 < watching.last["2.weight", "update"]["ratio"] < 1e-8
    assert watching.findings() == []


def test_codes_of_which_nothing_is_learned_have_no_dead_units_and_are_not_constant():
    class Coded(nn.Module):
        def forward(self, x):
            return F.one_hot((x[:, 20] > 0).long(), 10).float()

    class Masked(nn.Module):
        def forward(self, x):
            return torch.zeros_like(x[:, :1])

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.code, self.mask = Coded(), Masked()
            self.first, self.last = nn.Linear(74, 16), nn.Linear(16, 10)

        def forward(self, x):
            x = torch.cat([x, self.code(x)], 1) + self.mask(x)
            return self.last(self.first(x).relu())

    watching, _ = train_watched(Net(), 40)
    assert watching.last["code", "output"]["dead"] > 0.7
    assert watching.findings() == []


def test_a_gate_that_always_chooses_the_same_is_a_constant_output():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores = nn.Linear(64, 4)
            nn.init.constant_(self.scores.bias[0], 1000.0)

        def forward(self, x):
            return self.scores(x).softmax(-1)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = Gate(), nn.ModuleList(nn.Linear(64, 10) for _ in range(4))

        def forward(self, x):
            made = torch.stack([expert(x) for expert in self.experts], 2)
            return (made * self.gate(x)[:, None]).sum(2)

    watching, _ = train_watched(Net(), 20, every=2)
    assert ("constant output", "gate") in [(f.kind, f.place) for f in watching.findings()]


class Learned(nn.Module):
    def __init__(self, plain):
        super().__init__()
        self.value, self.plain = nn.Parameter(torch.full((1, 8), 0.5)), plain

    def forward(self, x=None):
        return self.value if self.plain else self.value.exp().expand(len(x), 8)


def test_a_module_that_gives_a_parameter_is_no_constant_output():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(64, 8), nn.Linear(8, 10)
            self.token, self.scale = Learned(plain=False), Learned(plain=True)

        def forward(self, x):
            return self.last((self.first(x) + self.token(x)) * self.scale() * self.scale())

    watching, _ = train_watched(Net(), 20, every=2)
    assert watching.last["token", "output"]["spread"] == 0
    assert watching.last["scale", "output"]["spread"] == 0
    assert watching.findings() == []


def test_a_layer_of_the_users_that_ignores_its_input_is_found():
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 64))

        def forward(self, x):
            return (x * 0) @ self.weight.t() + 1

    model = nn.Sequential(Linear(), nn.Linear(8, 10))
    watching, _ = train_watched(model, 20, every=2)
    assert ("constant output", "0") in [(f.kind, f.place) for f in watching.findings()]


class Widened(nn.Module):
    """A shortcut that puts channels of zeros beside those that it is given."""

    def __init__(self, padded):
        super().__init__()
        self.padded = padded

    def forward(self, x):
        if self.padded:
            return F.pad(x, (0, 0, 0, 0, 4, 4))
        return torch.cat([x, x * 0], 1)


@pytest.mark.parametrize("padded", [True, False])
def test_channels_of_zeros_that_a_shortcut_adds_are_not_dead(padded):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.act = nn.Conv2d(1, 8, 3), nn.ReLU()
            self.wide, self.last = Widened(padded), nn.Conv2d(16, 1, 6)

        def forward(self, x):
            return self.last(self.wide(self.act(self.first(x))))

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with hl.watch(model, every=1, optimizer=optimizer) as watching:
        for _ in range(6):
            model(torch.randn(32, 1, 8, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert watching.findings() == []


class Clipped(nn.Module):
    """A ReLU that puts zeros around images, or gives both signs."""

    def __init__(self, padded):
        super().__init__()
        self.padded = padded

    def forward(self, x):
        if self.padded:
            return F.pad(x.relu(), (1, 1, 1, 1))
        return torch.cat([x.relu(), x[:, :2].relu()], 1)


@pytest.mark.parametrize("padded", [True, False])
def test_dead_units_are_found_behind_padding_of_images_and_where_units_are_joined(padded):
    size, channels = (8, 8) if padded else (6, 10)
    last = nn.Conv2d(channels, 10, size)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), Clipped(padded), last, nn.Flatten())
    with torch.no_grad():
        model[0].bias[:6] = -1000
    watching, _ = train_watched(model, 20, every=2, shape=(1, 8, 8))
    assert ("dead units", "1") in [(f.kind, f.place) for f in watching.findings()]


def test_a_gradient_that_vanishes_in_a_branch_is_found_though_the_layer_before_it_has_one():
    class Branched(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            layers = [layer for _ in range(8) for layer in (nn.Linear(32, 32), nn.Sigmoid())]
            self.stem, self.deep = nn.Linear(64, 32), nn.Sequential(*layers)
            self.head = nn.Linear(32, 10)

        def forward(self, x):
            h = self.stem(x)
            return self.head(h + self.deep(h))

    watching, _ = train_watched(Branched(), 30)
    finding = one(watching, "vanishing gradient")
    assert finding.place == "deep.0.weight"
    assert 1e-8 < finding.evidence["relative"] < 1e-6


def test_a_rate_that_is_warmed_up_from_zero_is_no_finding():
    model = digit_mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 20))
    with hl.watch(model, every=1, optimizer=optimizer) as watching:
        for _ in range(40):
            pick = torch.randint(0, len(X), (64,))
            F.cross_entropy(model(X[pick]), Y[pick]).backward()
            optimizer.step()
            warm.step()
            optimizer.zero_grad()
    assert watching.findings() == []


def test_masks_of_minus_infinity_are_no_finding():
    class Masked(nn.Module):
        def forward(self, x):
            return x.masked_fill(torch.eye(8, dtype=torch.bool), -math.inf)

    model = nn.Sequential(nn.Linear(8, 8), Masked(), nn.Softmax(-1), nn.Linear(8, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model, every=1, optimizer=optimizer) as watching:
        for _ in range(8):
            model(torch.randn(16, 8, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert watching.findings() == []
    assert watching.last["1", "output"]["nonfinite"] == pytest.approx(1 / 8)


def test_a_sure_sigmoid_at_the_end_is_no_finding():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    with hl.watch(model, every=5, optimizer=optimizer) as watching:
        for _ in range(150):
            pick = torch.randint(0, len(X), (64,))
            F.binary_cross_entropy(model(X[pick])[:, 0], (Y[pick] == 0).float()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert watching.last["3", "output"]["saturated"] > 0.6
    assert watching.findings() == []


# -- illnesses -------------------------------------------------------------------------------------


def test_a_vanishing_gradient_is_found():
    watching, _ = train_watched(digit_mlp(nn.Sigmoid, width=32, depth=10))
    finding = one(watching, "vanishing gradient")
    assert finding.place == "0.weight"
    assert finding.evidence["relative"] < 1e-5
    assert "later layer" in finding.message
    assert "layer does not learn" not in kinds_found(watching)


class Louder(nn.Module):
    """Hands its input on, and makes gradients larger on their way back."""

    def forward(self, x):
        return x + 0.3 * (x - x.detach())


def test_a_gradient_that_explodes_on_its_way_is_found():
    torch.manual_seed(0)
    layers = []
    for _ in range(60):  # values keep their norm, so that no rounding decides what is found
        layers += [nn.Linear(64, 64), Louder()]
        nn.init.orthogonal_(layers[-2].weight)
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    watching, _ = train_watched(
        model, 6, torch.optim.SGD(model.parameters(), 1e-9), every=1, size=16
    )
    finding = one(watching, "exploding gradient")
    assert int(finding.place.split(".")[0]) < 60  # of 120
    assert finding.evidence["relative"] > 1e3
    assert "later layers" in finding.message


def test_a_gradient_that_explodes_with_the_steps_is_found():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.35)
    with hl.watch(model, every=1, optimizer=optimizer) as watching:
        for _ in range(60):
            loss = (model(X[:256]) - F.one_hot(Y[:256], 10)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if watching.findings():
                break
            for group in optimizer.param_groups:
                group["lr"] *= 1.1
    finding = one(watching, "exploding gradient")
    assert finding.evidence["norm"] > 10 * finding.evidence["first"]


def test_dead_relus_are_found():
    model = digit_mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1.5)  # far too large
    watching, _ = train_watched(model, 120, optimizer)
    finding = one(watching, "dead units")
    assert isinstance(model[int(finding.place)], nn.ReLU)
    assert finding.evidence["dead"] >= 0.4
    with torch.no_grad(), hl.capture(model, finding.place) as record:
        model(X)
    dead = (record[finding.place] == 0).all(0).double().mean().item()
    assert dead >= 0.2


def test_units_that_are_active_only_rarely_are_not_dead():
    """As in a sparse autoencoder: each example has one of a thousand, and every one its turn."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.ReLU(), nn.Linear(1000, 4))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(1000))
    optimizer = torch.optim.SGD(model.parameters(), 1)
    dead = []
    with hl.watch(model, every=1, optimizer=optimizer) as watching:
        for _ in range(40):
            x = F.one_hot(torch.randint(0, 1000, (100,)), 1000).float()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            dead.append(watching.last["1", "output"]["dead"])
    assert min(dead) > 0.85  # of a step
    assert watching.findings() == []


def test_units_that_are_dead_among_others_that_are_active_rarely_are_found():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(80, 80, bias=False), nn.ReLU(), nn.Linear(80, 4))
    with torch.no_grad():
        model[0].weight.copy_(torch.diag(torch.tensor([1.0] * 40 + [-1.0] * 40)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with hl.watch(model, every=1, optimizer=optimizer) as watching:
        for _ in range(40):
            model(F.one_hot(torch.randint(0, 80, (99,)), 80).float()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert one(watching, "dead units").evidence["dead"] == 0.5


def test_dead_units_of_a_function_inside_a_module_are_found():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 32)
            nn.init.constant_(self.linear.bias, -30.0)

        def forward(self, x):
            return F.relu(self.linear(x) * 1.0)

    torch.manual_seed(0)
    watching, _ = train_watched(nn.Sequential(Block(), nn.Linear(32, 10)))
    finding = one(watching, "dead units")
    assert finding.place == "0"
    assert "32 of 32 units" in finding.message
    assert "(Block)" in finding.message


@pytest.mark.parametrize("act", [nn.Tanh, nn.Sigmoid])
def test_saturated_units_are_found(act):
    model = digit_mlp(act, depth=2)
    with torch.no_grad():
        model[0].weight.mul_(60)
    watching, _ = train_watched(model)
    finding = one(watching, "saturated units")
    assert finding.place == "1"
    assert finding.evidence["saturated"] > 0.6


def test_a_sigmoid_that_is_called_last_may_be_sure_whatever_its_place_in_the_class_is():
    watching, _ = train_watched(sure(), steps=30)
    assert watching.last["sigmoid", "output"]["saturated"] > 0.6
    assert watching.findings() == []


@pytest.mark.parametrize("options", [{"kinds": "output"}, {"where": "1"}, {"where": ["1", "0"]}])
def test_saturated_units_are_found_where_not_all_is_measured(options):
    model = digit_mlp(nn.Tanh, depth=1)
    with torch.no_grad():
        model[0].weight.mul_(100)
    watching, _ = train_watched(model, steps=20, every=1, **options)
    assert one(watching, "saturated units").place == "1"


def test_a_layer_that_the_optimizer_does_not_have_is_found():
    model = digit_mlp()
    optimizer = torch.optim.Adam([*model[0].parameters(), *model[4:].parameters()], 1e-3)
    watching, _ = train_watched(model, optimizer=optimizer)
    finding = one(watching, "layer does not learn")
    assert finding.place == "2.weight"
    assert finding.evidence["ratio"] == 0
    assert kinds_found(watching) == {"layer does not learn"}


def test_a_layer_with_a_tiny_rate_is_found():
    model = digit_mlp()
    groups = [{"params": model[:2].parameters(), "lr": 1e-9}, {"params": model[2:].parameters()}]
    watching, _ = train_watched(model, optimizer=torch.optim.Adam(groups, 1e-3))
    finding = one(watching, "layer does not learn")
    assert finding.place == "0.weight"
    assert 0 <= finding.evidence["ratio"] < 1e-4 * finding.evidence["median"]


def test_updates_that_bfloat16_loses_are_found():
    model = digit_mlp()
    model[2].bfloat16()
    model[2].weight.data.fill_(1.0).add_(torch.randn(64, 64).bfloat16() / 50)

    class Cast(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x.bfloat16()).float() / 64

    model[2] = Cast(model[2])
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    watching, _ = train_watched(model, optimizer=optimizer)
    finding = one(watching, "layer does not learn")
    assert finding.place == "2.inner.weight"
    assert "half precision" in finding.advice


def test_an_optimizer_of_another_model_is_found():
    model, other = digit_mlp(), digit_mlp()
    watching, _ = train_watched(model, optimizer=torch.optim.SGD(other.parameters(), 0.1))
    finding = one(watching, "layer does not learn")
    assert finding.place == "0.weight"
    assert finding.evidence["ratio"] == 0
    assert "So it is at 3 other places" in finding.message
    assert "See that the optimizer has this parameter" in finding.advice
    assert len(watching.findings()) == 1


def test_a_training_all_of_which_bfloat16_loses_is_found():
    model = digit_mlp().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    watching, _ = train_watched(model, optimizer=optimizer, data=(X.bfloat16(), Y))
    finding = one(watching, "layer does not learn")
    assert finding.evidence["ratio"] > 0  # values near zero still change
    assert "half precision" in finding.advice


@pytest.mark.parametrize("sparse", [False, True])
def test_an_embedding_of_which_few_rows_are_used_is_no_finding(sparse):
    torch.manual_seed(0)
    model = nn.EmbeddingBag(5000, 8, mode="sum", sparse=sparse)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model, every=1, optimizer=optimizer) as watching:
        for _ in range(10):
            model(torch.randint(0, 5000, (8, 2))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert watching.last["weight", "update"]["zeros"] > 0.99
    assert watching.findings() == []


class Words(nn.Module):
    """So many words that a sample of the weights misses those of a step."""

    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.last = nn.Embedding(50_000, 16, sparse=sparse), nn.Linear(16, 10)

    def forward(self, ids):
        return self.last(self.words(ids)).square().mean()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("learned", [False, True])
def test_an_embedding_does_not_learn_only_if_the_rows_in_use_do_not_change(sparse, learned):
    model, found = Words(sparse), []
    held = model.parameters() if learned else model.last.parameters()
    optimizer = torch.optim.SGD(held, 0.1)
    with hl.watch(model, every=1, optimizer=optimizer) as watching:
        for _ in range(10):
            model(torch.tensor([[1, 2, 3, 5]])).backward()
            optimizer.step()
            model.zero_grad()
            found.append(watching.last["words.weight", "update"]["ratio"])
    assert not any(found)  # the sample shows nothing, either way
    assert [finding.place for finding in watching.findings()] == ["words.weight"] * (not learned)


def test_a_rate_that_ends_at_zero_is_no_finding():
    model = digit_mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    end = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0, 1 - step / 10))
    with hl.watch(model, every=1, optimizer=optimizer) as watching:
        for _ in range(20):
            F.cross_entropy(model(X[:64]), Y[:64]).backward()
            optimizer.step()
            end.step()
            optimizer.zero_grad()
    assert watching.last["0.weight", "update"]["zeros"] == 1
    assert watching.findings() == []


def test_unused_parameters_are_found():
    class Forgotten(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.left = nn.Linear(64, 10), nn.Linear(64, 10)

        def forward(self, x):
            return self.used(x)

    watching, _ = train_watched(Forgotten(), steps=40)
    finding = one(watching, "unused parameters")
    assert finding.place == "left.weight"
    assert finding.evidence["parameters"] == 2
    assert "'left.bias'" in finding.message
    assert kinds_found(watching) == {"unused parameters"}


def test_a_constant_output_is_found():
    class Collapsed(nn.Module):
        """Divides by far too much, so that only the bias is left."""

        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(64, 32), nn.Linear(32, 10)

        def forward(self, x):
            return self.last(self.first(x) * 1e-12)

    torch.manual_seed(0)
    watching, _ = train_watched(Collapsed(), every=2, steps=30)
    finding = one(watching, "constant output")
    assert finding.place == "last"
    assert finding.evidence["spread"] <= 1e-6


@pytest.mark.parametrize("where", ["output", "gradient", "weight"])
def test_values_that_are_not_finite_are_found_at_once(where):
    model = digit_mlp()
    seen = []

    def spoil(value):
        seen.append(1)
        if len(seen) == 12:
            return value.clone().index_fill_(1, torch.tensor([3]), math.nan)
        return None

    place = {"output": "2", "gradient": "2:grad_output", "weight": "4"}[where]
    if where == "weight":
        with torch.no_grad():
            model[4].weight[5, 5] = math.inf
        watching, _ = train_watched(model, 5, every=1)
    else:
        with hl.hook(model, place, spoil):
            watching, _ = train_watched(model, 14, every=1)
    finding = one(watching, "non-finite values")
    assert finding.severity == "error"
    assert len(watching.findings()) == 1
    assert "hookline.guard" in finding.advice
    if where == "weight":
        assert finding.step == 0
        assert finding.place == "4.weight"
    else:
        assert finding.step == 11
        assert finding.place == "2"


@pytest.mark.parametrize("bad", [12, 10])
def test_weights_that_were_not_finite_before_a_measured_step_are_told_as_such(bad):
    """Of what is made at a measured step, the place is told; of other steps only what is left."""
    model = digit_mlp(depth=1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with hl.watch(model, every=5, optimizer=optimizer) as watching:
        for step in range(20):
            loss = model(X[:64]).square().mean()
            (loss / 0 if step == bad else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
    (finding,) = watching.findings()
    assert (finding.step, finding.place) == ((10, "2") if bad == 10 else (15, "0.weight"))
    assert ("before this step" in finding.message) == (bad == 12)
    assert finding.evidence["nonfinite"] > 0


def test_after_values_that_are_not_finite_no_other_finding_follows_from_them():
    model = digit_mlp()
    with torch.no_grad():
        model[0].weight[:60] = math.nan
        model[0].bias[60:] = -1e3  # the only finite units give zeros
    watching, _ = train_watched(model, 8, torch.optim.SGD(model.parameters(), 0.0), every=1)
    assert kinds_found(watching) == {"non-finite values"}


def test_a_finding_is_told_once_and_written(tmp_path):
    model = digit_mlp()
    optimizer = torch.optim.Adam([*model[0].parameters(), *model[4:].parameters()], 1e-3)
    watching, _ = train_watched(model, 80, optimizer, to=tmp_path / "run")
    assert len(watching.findings()) == 1
    assert hl.Run(tmp_path / "run").findings() == watching.findings()


def test_findings_are_printed_in_columns_and_no_wider_than_a_terminal():
    advice = "Lower the learning rate, or look at the layers before. " * 4
    found = Findings(
        [
            Finding("dead units", "2", 5, "All of them.", {}, advice.strip()),
            Finding("non-finite values", "blocks.1", 12_345, "One NaN.", {}, "", "error"),
        ]
    )
    lines = str(found).splitlines()
    assert lines[0] == "step      5  2         dead units"
    assert lines[-2:] == ["step 12,345  blocks.1  error: non-finite values", "    One NaN."]
    assert max(map(len, lines)) <= 100
    assert " ".join(line.strip() for line in lines[2:-2]) == advice.strip()
    assert str(Findings()) == "[]"
