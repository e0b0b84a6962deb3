"""Tests that run on two ranks: two processes joined by gloo.

- `on_ranks`: makes a test run in both processes; what fails in one of them fails the test

The processes are started once and serve one test after the other, since importing torch takes
seconds. If a test failed on one of them only, they are ended, and the next test starts new ones: a
rank that failed may have left the other one waiting for it.
"""

import atexit
import functools
import importlib
import os
import sys
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import wait

import torch
from torch import distributed, multiprocessing

WORLD = 2
TIMEOUT = timedelta(seconds=60)
_LATE, _DEAD = "did not come to an end", "the process died"


def on_ranks(function):
    """Run a test on two ranks; its arguments are passed on."""

    @functools.wraps(function)
    def test(*args, **kwargs):
        _ranks().run(function.__module__, function.__name__, args, kwargs)

    test.on_one = function
    return test


class _Ranks:
    """Two processes that run tests by name."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        # Port 0: the system chooses a free one.
        self.store = distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT
        )
        self.pipes, self.processes = [], []
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.store.port, theirs, sys.path), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, module, name, args, kwargs) -> None:
        for pipe in self.pipes:
            pipe.send((module, name, args, kwargs))
        waiting = list(self.pipes)
        failures = {}
        until = time.monotonic() + TIMEOUT.total_seconds()
        while waiting:
            for pipe in wait(waiting, max(0, until - time.monotonic())) or waiting[:]:
                rank = self.pipes.index(pipe)
                waiting.remove(pipe)
                try:
                    failure = pipe.recv() if pipe.poll() else _LATE
                except EOFError:
                    failure = _DEAD
                if failure:
                    failures[rank] = failure
                    until = min(until, time.monotonic() + 2)  # the other may wait for this one
        if failures:
            if len(failures) < WORLD or {_LATE, _DEAD} & {*failures.values()}:
                self.end()
            raise AssertionError(
                "\n".join(f"On rank {rank}: {text}" for rank, text in sorted(failures.items()))
            )

    def close(self) -> None:
        """Let the processes end by themselves, so that they write what `make coverage` counts."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(timeout=10)
        self.end()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        _ranks.cache_clear()


@functools.cache
def _ranks() -> _Ranks:
    ranks = _Ranks()
    atexit.register(ranks.close)
    return ranks


def _serve(rank, port, pipe, path) -> None:
    """Run the tests that come through the pipe, in the process of one rank."""
    sys.path[:] = path
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    store = distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD, timeout=TIMEOUT
    )
    while True:
        try:
            module, name, args, kwargs = pipe.recv()
        except EOFError:
            break
        try:
            torch.manual_seed(0)
            getattr(importlib.import_module(module), name).on_one(*args, **kwargs)
        except BaseException:
            pipe.send(traceback.format_exc())
        else:
            pipe.send(None)
