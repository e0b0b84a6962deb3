"""Harvest on many ranks: each process takes its share of the batches, and writes its own shards.

    torchrun --nproc-per-node 2 examples/17_harvest_ranks.py acts

Run it again after a crash, or after kill -9 of any process: it completes the store. Without
torchrun it is one process that takes everything.
"""

import os
import sys
import tempfile

import torch
from torch import nn

import hookline as hl

torch.manual_seed(0)  # every rank makes the same model, and sees the same data in the same order
layer = nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, batch_first=True)
model = nn.TransformerEncoder(layer, num_layers=4).eval()
data = torch.randn(256, 10, 32).split(16)

folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp() + "/acts"
store = hl.harvest(
    model, data, "layers.{0,2}", to=folder, dtype=torch.bfloat16, statistics=[hl.Mean()]
)

if os.environ.get("RANK", "0") == "0":  # it has waited for the others
    print(store)
    print("every sample once:", sorted(store.ids) == list(range(256)))
    mean = hl.Measurements.load(f"{folder}/statistics")["layers.2"]["mean"]
    rows = store["layers.2"][:].double()
    print("statistics of all ranks:", torch.allclose(mean, rows.mean((0, 1)), rtol=1e-9))
