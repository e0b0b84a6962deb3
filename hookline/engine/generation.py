"""Which step of a generation runs: the prompt, or generated tokens.

- `Generation`: tells it, for the calls of a context's modules
- `UnknownStep`: why it cannot be told
- `Steps`: what was told of the calls of one module, for those that a backward runs again
- `takers_above(model, modules)`: the modules by whose calls it is told

Only facts decide, and what they leave open is not guessed:

- A forward that is given no cache of keys and values, or an empty one, is the prompt.
- A forward inside transformers' `generate()`, which that calls itself after the prompt, is of
  generated tokens. `generate` is found on the Python stack by its public name, and asked for its
  public parameters.
- Any other forward that is given a filled cache may be either.

Nothing here keeps alive what a generation has made. Python has no weak references to frames: a run
of `generate()` is known by its own copy of the generation config, a forward by its tensors.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from types import FrameType
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from torch import Tensor, nn

from hookline.engine import arguments
from hookline.engine.calls import is_over
from hookline.engine.checkpointing import running_modules
from hookline.torch_private import CALL_CODE
from hookline.values.nested import leaves

__all__ = ["FORGOTTEN", "Generation", "Step", "Steps", "UnknownStep", "takers_above"]

# The names that transformers gives to the argument; a module that has none of them takes no cache.
_NAMES = ("past_key_values", "cache_params", "past_key_value", "layer_past")
_PAGED = "cache"  # the name in its continuous batching, which mixes prompts and generated tokens
_HOME = "transformers.generation.utils"
_OWN = (_HOME, "torch.")  # whose frames stand between generate() and the forwards that it calls
_PLAIN = ("greedy_search", "sample", "beam_search", "beam_sample")  # a prompt, then tokens
_ASSISTED = "assisted_generation"
_RECENT = 64  # runs of calls of one kind that are remembered


class UnknownStep(NamedTuple):
    """Why a call cannot be told to be of the prompt or of generated tokens."""

    found: str
    remedy: str = "Give numbers in calls=, which count all calls."


Step: TypeAlias = Literal["prompt", "generated"] | UnknownStep

_WHOLE = "Give the whole model, the one whose generate() or forward is called."
OUTSIDE = UnknownStep("its module was called outside of every forward that takes a cache.", _WHOLE)
UNKNOWN = UnknownStep("the forward was given a cache that does not say whether it is empty.")
CONTINUED = UnknownStep(
    "the forward was given a cache that holds tokens already, of layers before it or of a forward "
    "that was no step of this generate(): what comes may be more of a prompt, or generated tokens.",
    "If this is a part of a model, give the whole model; else numbers in calls=.",
)
CACHELESS = UnknownStep(
    "without a cache (use_cache=False), a later forward of generate() holds the prompt and the "
    "generated tokens.",
    "Generate with a cache, or give numbers in calls=.",
)
CHUNK = UnknownStep(
    "generate() runs the prompt in chunks (prefill_chunk_size), and this may be one of them.",
    "Generate without prefill_chunk_size, or give numbers in calls=.",
)
ASSISTED = UnknownStep(
    "the first forward of assisted decoding holds the prompt and candidates for the next tokens.",
    "Generate without an assistant, or give numbers in calls=.",
)
FORGOTTEN = UnknownStep("a backward runs it again, and what it was of is forgotten.")


class _Seen(threading.local):
    """The forwards and runs of one thread."""

    def __init__(self) -> None:
        self.forwards: list[tuple[FrameType, Step]] = []  # those that take a cache
        self.runs: list[_Run] = []


class Generation:
    """Tells which step of a generation runs, for the calls of a context's modules.

    The takers are the modules that take a cache, above the others or among them.
    """

    def __init__(self, takers: Iterable[nn.Module]) -> None:
        self.takers = {id(module) for module in takers}
        self.encoders = {ident for module in takers for ident in _encoder_of(module)}
        self.seen = _Seen()

    def running(self) -> list[tuple[FrameType, Step]]:
        """Return the forwards with a cache that run in this thread; of nested ones the first."""
        found = self.seen.forwards
        while found and is_over(found[-1][0]):  # it raised
            found.pop()
        return found

    def enter(self, module: nn.Module, args: Any, kwargs: Any, caller: FrameType) -> Step:
        """Return the step that the forward of a module which takes a cache is of; it begins now."""
        running = self.running()
        found = _find(module, caller, running[-1][0] if running else None)
        if found is None and running:
            return running[-1][1]
        given = arguments.bind(module, args, kwargs)
        step = _plain(given) if found is None else self._within(found, given)
        running.append((caller, step))
        return step

    def leave(self, caller: FrameType) -> None:
        """Note that the forward of such a module has ended."""
        running = self.running()
        if running and running[-1][0] is caller:
            running.pop()

    def current(self, module: nn.Module, caller: FrameType) -> Step:
        """Return the step that a call of any other module is of."""
        running = self.running()
        if running:
            return running[-1][1]
        if self.encoders & running_modules(caller):
            return "prompt"
        found = _find(module, caller, None)
        if found is None or found.own or id(found.model) not in self.takers:
            return OUTSIDE
        # generate() calls modules before the first forward, to encode an image, for example.
        return "prompt" if self._run_of(found.generate) is None else OUTSIDE

    def _run_of(self, generate: FrameType) -> _Run | None:
        """Return what is known of a run, if it has begun to call the model."""
        config, runs = generate.f_locals.get("generation_config"), self.seen.runs
        runs[:] = [run for run in runs if run.config() is not None]
        return next((run for run in runs if run.config() is config), None)

    def _within(self, found: _Found, given: dict[Any, Any]) -> Step:
        """Return the step that a forward inside generate() is of."""
        run = self._run_of(found.generate)
        if not found.own:  # an encoder
            return _plain(given) if run is None and found.direct else _aside(found)
        if run is None:
            run = _Run(found.generate.f_locals)
            self.seen.runs.append(run)
        if not run.is_in(found):  # else a part of this forward was called before
            run.begin(found)
            run.step = run.next(given) if found.direct else _aside(found)
        return run.step


class _Run:
    """One run of generate(), as far as it is known."""

    begun = False
    whole = False  # whether the first forward had the whole prompt
    # Of the last forward: the tensors that it was given, and the step that it is of.
    tensors: Sequence[weakref.ref[Tensor]] = ()
    step: Step = OUTSIDE

    def __init__(self, known: Mapping[str, Any]) -> None:
        config, self.mode = known.get("generation_config"), "unknown"
        self.config: Callable[[], Any] = lambda: None
        if config is not None:
            self.config = weakref.ref(config)  # that of the user is copied for each run
            self.mode = str(config.get_generation_mode(known.get("assistant_model")).value)
        self.chunk: int | None = getattr(config, "prefill_chunk_size", None)

    def begin(self, found: _Found) -> None:
        """Note the tensors that a forward is given, by which its calls are known."""
        self.tensors = [weakref.ref(tensor) for tensor in found.tensors()]

    def is_in(self, found: _Found) -> bool:
        """Return True if a call belongs to the last forward."""
        known = [ref() for ref in self.tensors]
        tensors = found.tensors()
        return len(known) == len(tensors) > 0 and all(map(is_, known, tensors))

    def next(self, given: dict[Any, Any]) -> Step:
        """Return the step that the next forward is of."""
        begun, self.begun = self.begun, True
        if self.mode not in (*_PLAIN, _ASSISTED):
            found = f"what the forwards of generate() hold in the mode {self.mode!r} is not known."
            return UnknownStep(found)
        if not begun:
            return ASSISTED if self.mode == _ASSISTED else _plain(given)
        cache = _cache_in(given)
        if _is_filled(cache) is not True:
            return CACHELESS
        if self.chunk is None or self.whole:
            return "generated"
        length = _length(cache)
        self.whole = length is not None and length < self.chunk
        self.chunk = self.chunk if self.whole else 0  # the others are later ones
        return "generated" if self.whole else CHUNK


class _Found(NamedTuple):
    """The generate() in which a module is called."""

    generate: FrameType
    model: nn.Module  # whose generate() it is
    call: FrameType  # the outermost call of a module that it makes
    between: str | None  # the function through which it does so, if not by itself

    @property
    def own(self) -> bool:
        """Return True if it is a forward of the model."""
        return self.call.f_locals["self"] is self.model

    @property
    def direct(self) -> bool:
        return self.between is None

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the forward was given."""
        given = self.call.f_locals
        return [tensor for _, tensor in leaves((given["args"], given["kwargs"]))]


def _find(module: nn.Module, caller: FrameType, until: FrameType | None) -> _Found | None:
    """Return the innermost generate() above a call whose model holds the module."""
    call: FrameType | None = None
    between: str | None = None
    frame: FrameType | None = caller
    while frame is not None and frame is not until:
        code, home = frame.f_code, str(frame.f_globals.get("__name__"))
        if code is CALL_CODE:
            call, between = frame, None
        elif code.co_name == "generate" and home == _HOME:
            model: nn.Module = frame.f_locals["self"]
            if call is not None and any(inner is module for inner in model.modules()):
                return _Found(frame, model, call, between)
            between = code.co_qualname
        elif not home.startswith(_OWN):
            between = code.co_qualname
        frame = frame.f_back
    return None


def _aside(found: _Found) -> UnknownStep:
    function = found.between or "another module"
    return UnknownStep(
        f"it was called in generate() by {function}, not as a step of the generation."
    )


def _plain(given: dict[Any, Any]) -> Step:
    """Return the step that a forward is of, as far as its cache tells."""
    filled = _is_filled(_cache_in(given))
    if filled is None:
        return UNKNOWN
    return CONTINUED if filled else "prompt"


# -- caches ---------------------------------------------------------------------------------------


def takers_above(model: nn.Module, modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules whose forward takes a cache, above these modules or among them."""
    wanted = {id(module) for module in modules}
    return [
        module
        for module in model.modules()
        if _takes_cache(module) and not wanted.isdisjoint(id(m) for m in module.modules())
    ]


def _takes_cache(module: nn.Module) -> bool:
    names = arguments.names(module)
    return any(name in names for name in _NAMES)


def _encoder_of(module: Any) -> set[int]:
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False) is True:
        encoder = module.get_encoder() if hasattr(module, "get_encoder") else None
        if isinstance(encoder, nn.Module) and encoder is not module:
            return {id(encoder)}
    return set()


def _cache_in(given: dict[Any, Any]) -> Any:
    """Return the cache among the arguments of a call."""
    if given.get(_PAGED) is not None:
        return _PAGED
    return next((given[name] for name in _NAMES if given.get(name) is not None), None)


def _is_filled(cache: Any) -> bool | None:
    """Return whether a cache holds tokens; None if it does not say."""
    if cache is None:
        return False
    if isinstance(cache, (tuple, list, Tensor)):
        return any(tensor.numel() for _, tensor in leaves(cast(Any, cache)))
    length = _length(cache)
    if length is not None:
        return length > 0
    try:  # a recurrent state has no length
        previous = cache.has_previous_state
        return bool(previous() if callable(previous) else previous)
    except (AttributeError, TypeError, ValueError):
        return None


def _length(cache: Any) -> int | None:
    try:
        return int(cache.get_seq_length())
    except (AttributeError, TypeError, ValueError):
        return None


class Steps:
    """The steps of the calls of one module, for those that a backward runs again."""

    def __init__(self) -> None:
        self.starts: list[int] = []  # calls from which on something else was told
        self.told: list[Step] = []

    def note(self, number: int, step: Step) -> None:
        """Note the step of a call."""
        if not self.told or self.told[-1] != step:
            self.starts.append(number)
            self.told.append(step)
            del self.starts[:-_RECENT], self.told[:-_RECENT]

    def of(self, number: int) -> Step:
        """Return the step of a call."""
        position = bisect_right(self.starts, number) - 1
        return self.told[position] if position >= 0 else FORGOTTEN
