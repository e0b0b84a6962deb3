"""One library in a process of its own, which does what it is told over a pipe.

So that no library slows another one down (some wrap torch's functions for good), and so that all
can take turns on one machine: a process that waits costs nothing.

- `serve(name)` answers requests, one line of JSON each
- `Worker` is the other end
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
SLOW, LONG = 0.5, 5.0  # seconds


# The process of one library.


def status(key: str) -> float:
    """A line of /proc/self/status in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise KeyError(key)


def torch_functions() -> dict[tuple[str, str], object]:
    """What a library could wrap or replace."""
    import torch

    owners = (torch, torch.Tensor, torch.nn.Module, torch.nn.functional, torch.autograd)
    found = {
        (owner.__name__, name): value
        for owner in owners
        for name, value in vars(owner).items()
        if callable(value)
    }
    del found["torch", "manual_seed"]  # torch replaces it itself when its compiler is imported
    return found | {("sys", "excepthook"): sys.excepthook}


class Session:
    """What one library has built so far."""

    def __init__(self, name: str) -> None:
        import torch

        torch.set_num_threads(1)
        self.name = name
        self.before = torch_functions()
        self.works: dict[str, Any] = {}
        self.uses: dict[str, Any] = {}
        self.took: dict[str, float] = {}

    def ready(self) -> dict[str, Any]:
        """Torch is imported."""
        return {}

    def hello(self) -> dict[str, Any]:
        """Import the library, and say what it is."""
        from peers import load

        megabytes, start = status("VmRSS"), time.perf_counter()
        self.peer = load(self.name)
        imported = {
            "import_seconds": time.perf_counter() - start,
            "import_megabytes": status("VmRSS") - megabytes,
        }
        try:
            version = importlib.metadata.version(self.peer.PACKAGE)
        except importlib.metadata.PackageNotFoundError:  # imported from the tree
            version = "not installed"
        return {
            **imported,
            "version": version,
            **{key: getattr(self.peer, key.upper()) for key in ("title", "source", "notes")},
        }

    def load_models(self) -> dict[str, Any]:
        """Import what the tasks need besides, which no library is to be blamed for."""
        if hasattr(self.peer, "capture"):
            importlib.import_module("transformers.models.gpt2.modeling_gpt2")
        return {}

    def prepare(self, task: str) -> dict[str, Any]:
        """Do a task once, and see whether it was done right."""
        import torch

        from peers.tasks import TASKS

        found = next(one for one in TASKS if one.name == task)
        if not hasattr(self.peer, found.verb):
            return {"verdict": "absent", "reason": self.peer.ABSENT.get(found.verb, "none")}
        try:
            with torch.no_grad():
                work = found.build(self.peer, False)
            with torch.set_grad_enabled(work.gradients):
                use = work.make()
                took, answer = timed(use)
                right = work.right(answer)
                if SLOW < took < LONG:  # some import more at the first use
                    took, _ = timed(use)
                start = time.perf_counter()
                use = work.make()
                setup = time.perf_counter() - start
        except NotImplementedError as error:
            return {"verdict": "absent", "reason": str(error)}
        except Exception as error:
            from peers.probes import said

            return {"verdict": "error", "reason": said(error)}
        if not right:
            return {"verdict": "wrong", "reason": "not what raw hooks give"}
        self.works[task], self.uses[task], self.took[task] = work, use, took
        return {"verdict": "right", "reason": "", "setup": setup, "took": took}

    def settle(self) -> dict[str, Any]:
        """Take all that was imported and built out of the collector's sight, once for all turns.

        A library may hold a million objects: to scan them takes longer than a turn.
        """
        gc.collect()
        gc.freeze()
        return {}

    def time(self, task: str, seconds: float) -> dict[str, Any]:
        """Run the bare model and the use in turn, for about that long."""
        import torch

        work, use, clock = self.works[task], self.uses[task], time.perf_counter_ns
        bare, used = [], []
        with no_garbage(), torch.set_grad_enabled(work.gradients):
            for run in (work.bare, use) if self.took[task] < seconds else ():
                run()  # caches are cold after a pause
            end = time.perf_counter() + seconds
            while not used or time.perf_counter() < end:
                start = clock()
                work.bare()
                middle = clock()
                use()
                used.append(clock() - middle)
                bare.append(middle - start)
        return {"bare": bare, "use": used}

    def memory(self, task: str, bare: bool) -> dict[str, Any]:
        """How far the memory grows in one use, and if asked in one run of the bare model."""
        import torch

        from peers.tasks import TASKS

        def measured() -> dict[str, float]:
            found = next(one for one in TASKS if one.name == task)
            grown: dict[str, float] = {}
            for _ in range(2):  # what is allocated once and stays does not count
                with torch.no_grad():
                    work = found.build(self.peer, True)
                with torch.set_grad_enabled(work.gradients):
                    if bare:
                        work.bare()
                        grown["bare"] = growth(work.bare)
                    # A fresh one: where hooks stay on, so do the values of the last run.
                    grown["use"] = growth(work.make())
                del work
            return grown

        return self.apart(measured, 120)

    def probe(self, title: str) -> dict[str, str]:
        from peers.probes import PROBES, PROCESS, Absent, said

        if title == PROCESS:
            return self.process()

        def tried() -> dict[str, str]:
            try:
                verdict, reason = PROBES[title](self.peer)
            except (Absent, NotImplementedError) as error:
                verdict, reason = "absent", str(error)
            except NameError:
                raise  # our own mistake
            except Exception as error:
                verdict, reason = "no", said(error)
            return {"verdict": verdict, "reason": reason}

        result = self.apart(tried, 90)
        return result if "verdict" in result else {"verdict": "no", "reason": result["error"]}

    def apart(self, work, seconds: int) -> dict[str, Any]:
        """In a fork, or here where the library refuses that."""
        return forked(work, seconds) if getattr(self.peer, "FORKS", True) else work()

    def process(self) -> dict[str, str]:
        """Compare torch with what it was before the library was imported."""
        now = torch_functions()
        other = [key for key, value in self.before.items() if now.get(key) is not value]
        if not other:
            return {"verdict": "yes", "reason": ""}
        named = ", ".join(".".join(key) for key in other[:3])
        return {"verdict": "no", "reason": f"{len(other)} are another object, {named} …"}


@contextlib.contextmanager
def no_garbage():
    """Collect what is left from before, and nothing meanwhile."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def timed(run) -> tuple[float, Any]:
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def growth(run) -> float:
    """The peak of resident memory in a run over what it was before, in MB."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before = status("VmRSS")
    result = run()
    peak = status("VmHWM")
    del result
    return max(peak - before, 0.0)


def forked(work, seconds: int) -> dict[str, Any]:
    """Do something in a copy of this process: nothing of it stays, and it may hang or crash."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):  # the parent sees that nothing came
            os.write(writing, json.dumps(work()).encode())
            code = 0
        os._exit(code)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], seconds)
    text = b""
    while ready and (more := os.read(reading, 65536)):
        text += more
    os.close(reading)
    if not ready:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if text:
        return json.loads(text)
    return {"error": "it did not end within the time" if not ready else "the process broke off"}


def serve(name: str) -> None:
    """Answer requests until the pipe closes. What the library prints goes to nowhere."""
    answers = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    warnings.simplefilter("ignore")
    session = Session(name)
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(session, request.pop("do"))(**request)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


# The other end.


class Gone(Exception):
    """The library's process ended, or does not answer."""


class Worker:
    def __init__(self, name: str) -> None:
        self.name = name
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "MALLOC_MMAP_THRESHOLD_": "65536",  # freed tensors go back to the system at once
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]),
        }
        self.folder = tempfile.TemporaryDirectory()
        self.log = Path(self.folder.name, "log")
        command = [sys.executable, "-c", f"from peers.worker import serve; serve({name!r})"]
        pipe = subprocess.PIPE
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment
            )

    def ask(self, do: str, *, within: float = 300, **request: Any) -> dict[str, Any]:
        self.send(do, **request)
        return self.answer(within)

    def send(self, do: str, **request: Any) -> None:
        try:
            self.process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise Gone(self.reason()) from error

    def answer(self, within: float) -> dict[str, Any]:
        ready, _, _ = select.select([self.process.stdout], [], [], within)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            reason = self.reason() if ready else "it did not answer in time"
            self.close()
            raise Gone(reason)
        return json.loads(line)

    def reason(self) -> str:
        """The last line of what the process said."""
        lines = self.log.read_text().strip().splitlines()
        return lines[-1][:200] if lines else "its process ended"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.folder.cleanup()
