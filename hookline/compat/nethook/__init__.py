"""nethook, as in baukit and in its older forms, on hookline.

    from hookline.compat import nethook

- `Trace`, `TraceDict`: retain, edit and stop at one layer, or at several
- `StopForward`: the exception that ends a forward early
- `Traced`: one layer of a TraceDict, with its `input` and `output`
- `InstrumentedModel`: a wrapper that retains and edits layers for as long as it is open
- `retain_layers`, `edit_layers`, `clear_edit`: retain and edit, in dicts on the model itself
- `Callbacks`: call a function with the value of each layer, and with its gradient
- `get_module`, `get_parameter`, `module_names`, `parameter_names`, `replace_module`,
  `set_requires_grad`: modules and parameters by their dotted names
- `subsequence`: a part of a Sequential
- `recursive_copy`: clone or detach the tensors in a structure
- `invoke_with_optional_args`: call a function with only the arguments that it takes

Names are literal: a `*` in one is no wildcard. Unlike the original, a wrong name leaves no hook
behind and the error shows the closest names; reading a value that was changed in place after it was
retained raises; and reading a value warns if those of earlier calls were never read.
"""

from hookline.compat.nethook.callbacks import Callbacks
from hookline.compat.nethook.instrumented_model import InstrumentedModel
from hookline.compat.nethook.model_attributes import clear_edit, edit_layers, retain_layers
from hookline.compat.nethook.module_names import (
    get_module,
    get_parameter,
    module_names,
    parameter_names,
    replace_module,
    set_requires_grad,
)
from hookline.compat.nethook.optional_arguments import invoke_with_optional_args
from hookline.compat.nethook.retained_values import recursive_copy
from hookline.compat.nethook.subsequences import subsequence
from hookline.compat.nethook.traced_layers import Traced
from hookline.compat.nethook.traces import StopForward, Trace, TraceDict

__all__ = [
    "Callbacks",
    "InstrumentedModel",
    "StopForward",
    "Trace",
    "TraceDict",
    "Traced",
    "clear_edit",
    "edit_layers",
    "get_module",
    "get_parameter",
    "invoke_with_optional_args",
    "module_names",
    "parameter_names",
    "recursive_copy",
    "replace_module",
    "retain_layers",
    "set_requires_grad",
    "subsequence",
]
