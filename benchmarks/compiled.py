"""What a capture costs when the model is compiled.

    python benchmarks/compiled.py                     about two minutes
    python benchmarks/compiled.py --backend eager     without inductor, seconds

A small transformer is compiled and run in turn as it is, with a capture that stays in the graph
(keep="last", attached before the first compiled call), with a capture under which it runs eagerly
(every other one), and eagerly without any. All in one interleaved run; the ratios are to the
compiled model. Writes latest/compiled.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from latest import in_full, write
from timing import Race, machine
from torch import Tensor, nn
from transformer import Size

import hookline as hl

SIZE = Size("64 x 64", batch=8, length=64, width=64)
BLOCKS = "blocks.*"


class Counted:
    """A backend, and how many graphs it was given."""

    def __init__(self, backend: str) -> None:
        self.backend, self.graphs = backend, 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        self.graphs += 1
        if self.backend == "eager":
            return graph.forward
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs)


def variants(backend: str) -> tuple[dict[str, Callable[[], object]], dict[str, Counted], Tensor]:
    """The same work in four ways, each on a model of its own: graphs are cached by code."""
    runs: dict[str, Callable[[], object]] = {}
    counts: dict[str, Counted] = {}

    def compiled(name: str) -> tuple[nn.Module, Callable[[Tensor], Tensor], Tensor]:
        model, batch = SIZE.build()
        counts[name] = Counted(backend)
        return model, torch.compile(model, backend=counts[name], fullgraph=True), batch

    __import__("torch._dynamo")  # loaded before the capture, which then knows that graphs may come

    model, run, batch = compiled("in the graph")
    handle = hl.capture(model, BLOCKS, keep="last").attach()
    run(batch)
    kept = handle.record["blocks.3"].clone()
    runs["capture in the graph"] = lambda run=run, batch=batch: (run(batch), handle.record)

    bare, run_bare, batch = compiled("bare")
    runs["compiled"] = lambda: run_bare(batch)
    run_bare(batch)

    def captured() -> object:
        with hl.capture(bare, BLOCKS) as record:
            run_bare(batch)
        return record

    torch.testing.assert_close(captured()["blocks.3"], kept, rtol=1e-3, atol=1e-3)
    runs["capture, eagerly"] = captured
    runs["eager"] = lambda: bare(batch)
    return runs, counts, kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        runs, counts, _ = variants(options.backend)
        race = Race(runs)
        race.warm_up()
        for _ in range(4):
            race.run(options.rounds // 4)
    where = machine()
    table = {name: race.fast(name) for name in runs}
    reference = table["compiled"]
    print(f"{where['cpu']}, torch {where['torch']}, one thread, backend {options.backend}")
    for name, fast in table.items():
        print(f"  {name:24} {fast:9.0f} µs   {fast / reference:5.2f} × compiled")
    graphs = {name: count.graphs for name, count in counts.items()}
    print(f"  graphs: {graphs}")
    content = {
        "machine": where,
        "backend": options.backend,
        "fast_us": table,
        "times_compiled": {name: fast / reference for name, fast in table.items()},
        "graphs": graphs,
    }
    write("compiled", content, in_full(parser, options))


if __name__ == "__main__":
    main()
