"""Observe, edit, save, measure and draw any value inside any PyTorch model.

Every value inside a model has an address, its place (`"layer1.0.conv2"`, `"fc:input"`,
`"**.weight:grad"`). A few verbs work on places:

- `select`: the places of a model that match
- `capture`: keep values while a block runs → `Record`
- `edit`: change values while a block runs, by `replace`, `add`, `scale`, `noise`, `zero`, `clamp`,
  `dropout`, `blend`, `remove_direction`, `patch`, or a function
- `Recipe`: edits that can be saved, joined and put on any model
- `measure`: `Mean`, `Variance`, `Covariance`, `Histogram`, `TopK`, `Norm`, `Sparsity` of values
  over a whole data set → `Measurements`
- `summarize`: the costs of each module: parameters, memory, FLOPs, time → `Summary`
- `compare`: where two models diverge, and by how much → `Comparison`
- `sweep`: the places and positions that matter to a metric, by patching → `Sweep`
- `hook`: call a function with every value; the primitive
- `preserve`, `replace_module`, `get_module`, `get_parameter`: parameters and modules
- `attention`: the attention patterns of models that never compute them
- `Store`: values on disk, as safetensors: `Store.create` writes, `Store.open` reads
- `report`: a record, a store, a run or a model as one HTML page
- `guard`: stop at the first producer of a NaN or an infinity; `replay` runs its dump again
- `watch`: statistics of a model while it is trained, and what is wrong with the training:
  `Finding`; `Run` reads its files
- `save_record`, `load_record`: a record on disk
- `harvest`: run a model over a data set and store values, on one process or many ranks
- `attached`: all contexts that are live on a model
- `heads`, `last_token`: slices for `at=`

Contexts such as `capture`, `edit`, `guard` and `watch` act inside `with`, or from `.attach()` to
`.remove()`; the other verbs are functions. Nothing is left behind.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hookline.supported_versions import check_torch

check_torch()  # before anything below imports torch

from hookline.captures.capturing import capture
from hookline.captures.record import Record
from hookline.edits.changes import Chain, Change, replace
from hookline.edits.editing import edit
from hookline.edits.ready_changes import (
    add,
    blend,
    clamp,
    dropout,
    noise,
    patch,
    remove_direction,
    scale,
    zero,
)
from hookline.edits.ready_slices import heads, last_token
from hookline.edits.restoring import get_module, get_parameter, preserve, replace_module
from hookline.engine.attaching import attached
from hookline.engine.calls import Call
from hookline.engine.hooking import hook
from hookline.errors import (
    BatchError,
    ChangeError,
    FigureError,
    GradientNotAvailable,
    HarvestError,
    HooklineError,
    HooklineWarning,
    MissingExtra,
    NeverFired,
    NonFiniteError,
    NotCaptured,
    NotHookable,
    PlaceError,
    PlaceNotFound,
    RecipeError,
    RecordError,
    ReplayError,
    ReportError,
    RunError,
    SeveralCalls,
    SeveralTensors,
    StatisticsError,
    StoreError,
    UnsupportedTorch,
    UsageError,
    ValueChanged,
)
from hookline.places.grammar import Place
from hookline.selecting import select
from hookline.values.tables import render_with as _render_with

if TYPE_CHECKING:
    from hookline.attention_patterns.patterns import attention
    from hookline.comparisons.comparing import compare
    from hookline.comparisons.differences import Comparison, Difference
    from hookline.comparisons.sweep_results import Effect, Sweep
    from hookline.comparisons.sweeping import sweep
    from hookline.costs.summarizing import summarize
    from hookline.costs.summary import ModuleCosts, Summary
    from hookline.guards.guarding import guard
    from hookline.guards.replaying import replay
    from hookline.harvests.harvesting import harvest
    from hookline.recipes.recipe import Recipe
    from hookline.statistics.all_statistics import (
        Covariance,
        Histogram,
        Mean,
        Norm,
        Sparsity,
        Statistic,
        TopK,
        Variance,
    )
    from hookline.statistics.measuring import Measurements, measure
    from hookline.storage.saved_records import load_record, save_record
    from hookline.storage.store import Store
    from hookline.training.findings import Finding
    from hookline.training.run_reading import Run
    from hookline.training.watching import Measured, watch
    from hookline.view.reporting import report

__all__ = [
    "BatchError",
    "Call",
    "Chain",
    "Change",
    "ChangeError",
    "Comparison",
    "Covariance",
    "Difference",
    "Effect",
    "FigureError",
    "Finding",
    "GradientNotAvailable",
    "HarvestError",
    "Histogram",
    "HooklineError",
    "HooklineWarning",
    "Mean",
    "Measured",
    "Measurements",
    "MissingExtra",
    "ModuleCosts",
    "NeverFired",
    "NonFiniteError",
    "Norm",
    "NotCaptured",
    "NotHookable",
    "Place",
    "PlaceError",
    "PlaceNotFound",
    "Recipe",
    "RecipeError",
    "Record",
    "RecordError",
    "ReplayError",
    "ReportError",
    "Run",
    "RunError",
    "SeveralCalls",
    "SeveralTensors",
    "Sparsity",
    "Statistic",
    "StatisticsError",
    "Store",
    "StoreError",
    "Summary",
    "Sweep",
    "TopK",
    "UnsupportedTorch",
    "UsageError",
    "ValueChanged",
    "Variance",
    "add",
    "attached",
    "attention",
    "blend",
    "capture",
    "clamp",
    "compare",
    "dropout",
    "edit",
    "get_module",
    "get_parameter",
    "guard",
    "harvest",
    "heads",
    "hook",
    "last_token",
    "load_record",
    "measure",
    "noise",
    "patch",
    "preserve",
    "remove_direction",
    "replace",
    "replace_module",
    "replay",
    "report",
    "save_record",
    "scale",
    "select",
    "summarize",
    "sweep",
    "watch",
    "zero",
]

__version__ = "0.1.0"

# Most programs use a few verbs: those that stand on the core are loaded when they are first used.
_LATER = {
    "attention_patterns.patterns": "attention",
    "comparisons.comparing": "compare",
    "costs.summarizing": "summarize",
    "comparisons.differences": "Comparison Difference",
    "training.findings": "Finding",
    "guards.guarding": "guard",
    "harvests.harvesting": "harvest",
    "view.reporting": "report",
    "recipes.recipe": "Recipe",
    "guards.replaying": "replay",
    "training.run_reading": "Run",
    "storage.saved_records": "load_record save_record",
    "statistics.all_statistics": "Covariance Histogram Mean Norm Sparsity Statistic TopK Variance",
    "statistics.measuring": "Measurements measure",
    "storage.store": "Store",
    "costs.summary": "ModuleCosts Summary",
    "comparisons.sweeping": "sweep",
    "comparisons.sweep_results": "Effect Sweep",
    "training.watching": "Measured watch",
}
_HOMES = {name: home for home, names in _LATER.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def _render(title: str, rows: Any, subject: Any) -> str:
    from hookline.view.notebook import render

    return render(title, rows, subject)


_render_with(_render)  # notebooks see tables with pictures


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
