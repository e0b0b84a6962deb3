"""Watching on two ranks with gloo: DDP and FSDP2; the whole batch in one process is the oracle."""

import pytest
import torch
from ranks import on_ranks
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hookline as hl


def small_tanh():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.Tanh())


def rows_of_rank(step, rank):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def train_on(model, steps, ranks, watching=None):
    """Train on the batches of these ranks, as the mean over them."""
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for step in range(steps):
        x = torch.cat([rows_of_rank(step, rank) for rank in ranks])
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def watched_alone(steps=3):
    """The same training in this process alone, watched."""
    model, found = small_tanh(), []
    watching = hl.watch(model, every=1, ranks="all", to=found.append)
    world = distributed.get_world_size
    distributed.get_world_size = lambda *args: 1  # alone
    try:
        with watching:
            train_on(model, steps, (0, 1))
    finally:
        distributed.get_world_size = world
    return watching.last


def spread(model, kind):
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2,))
    fully_shard(model[2], mesh=mesh)
    return fully_shard(model, mesh=mesh)


PARAMETERS = ("0.weight", "0.bias", "2.weight", "2.bias")
NAMES = ("mean", "std", "absmax", "norm", "zeros")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@on_ranks
def test_all_ranks_together_measure_what_one_process_does(kind):
    expected = watched_alone()
    model = spread(small_tanh(), kind)
    with hl.watch(model, every=1, ranks="all") as watching:
        train_on(model, 3, (distributed.get_rank(),))
    last = watching.last
    assert [row.place for row in last.rows] == [row.place for row in expected.rows]
    for place in PARAMETERS:
        for row in ("weight", "weight_grad", "update"):
            for name in NAMES:
                found, wanted = last[place, row][name], expected[place, row][name]
                assert found == pytest.approx(wanted, rel=1e-3, abs=1e-6), (place, row, name)
        found, wanted = last[place, "update"]["ratio"], expected[place, "update"]["ratio"]
        assert found == pytest.approx(wanted, rel=1e-3), place
    for place in ("0", "1", "2", "3"):
        for name in (*NAMES, "dead", "spread"):
            found, wanted = last[place, "output"][name], expected[place, "output"][name]
            assert found == pytest.approx(wanted, rel=1e-3, abs=1e-6, nan_ok=True), (place, name)
        # The loss of a rank is the mean over half of the batch: its gradients are twice as large.
        assert last[place, "grad"]["norm"] == pytest.approx(
            2 * expected[place, "grad"]["norm"], rel=1e-3
        )
    assert not hl.attached(model)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_rank_0_measures_its_own_and_the_others_nothing(kind, tmp_path):
    watch_own(kind, str(tmp_path / "run"))


@on_ranks
def watch_own(kind, folder):
    rank = distributed.get_rank()
    model = spread(small_tanh(), kind)
    with hl.watch(model, every=2, to=folder) as watching:
        train_on(model, 3, (rank,))
    assert watching.steps == 3
    if rank:
        assert watching.last is None
    else:
        assert watching.last.step == 2
        run = hl.Run(folder)
        assert run.segments == [0]
        assert run.head.options["world"] == 2
        assert run.head.options["ranks"] == "own"
        assert run.steps().tolist() == [0, 2]
        plain = small_tanh()
        x = rows_of_rank(0, 0)
        out = plain[0](x)
        assert run.series("0", "output", "norm")[1][0] == pytest.approx(out.norm().item(), rel=1e-4)
        if kind == "ddp":  # the reduced gradient, of both batches
            plain(torch.cat([x, rows_of_rank(0, 1)])).square().mean().backward()
            assert run.series("2.weight", "weight_grad", "norm")[1][0] == pytest.approx(
                plain[2].weight.grad.norm().item(), rel=1e-4
            )
    assert not hl.attached(model)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@on_ranks
def test_a_training_on_two_ranks_is_the_same_bit_for_bit(kind):
    def run(watched):
        model = spread(small_tanh(), kind)
        if watched:
            with hl.watch(model, every=1, ranks="all"):
                train_on(model, 3, (distributed.get_rank(),))
        else:
            train_on(model, 3, (distributed.get_rank(),))
        return [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]

    for one, other in zip(run(False), run(True), strict=True):
        assert torch.equal(one, other)
