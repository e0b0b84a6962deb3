"""Harvest with Ray Data: a pool of actors, on this machine or on a cluster, writes one store.

Each actor makes the model once and writes as a rank of its own. Samples are told apart by their
ids, so that a batch that Ray runs twice is stored once; run again, it completes the store.
"""

import tempfile

import numpy as np
import ray
import torch
from torch import nn

import hookline as hl
from hookline.integrations.ray import Harvester


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU()).eval()


ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
x = np.random.default_rng(0).standard_normal((512, 8)).astype("float32")
items = [{"id": n, "x": row} for n, row in enumerate(x)]

folder = tempfile.mkdtemp() + "/acts"  # on a cluster: where all machines can write
options = {"model": make_model, "where": ["0", "2"], "to": folder, "ids": "id", "inputs": "x"}
written = (
    ray.data.from_items(items, override_num_blocks=16)
    .map_batches(
        Harvester,
        fn_constructor_kwargs=options,
        batch_size=32,
        compute=ray.data.ActorPoolStrategy(size=2),
    )
    .take_all()
)
ray.shutdown()

store = hl.Store.open(folder)
print(store)
print("every sample once:", sorted(store.ids) == list(range(512)))
print("all of them counted:", sum(row["samples"] for row in written) == 512)

alone = hl.harvest(make_model(), torch.from_numpy(x).split(32), ["0", "2"], to=folder + "-alone")
order = torch.tensor(store.ids).argsort()
print("the same as from one process:", torch.equal(store["2"][order], alone["2"][:]))
