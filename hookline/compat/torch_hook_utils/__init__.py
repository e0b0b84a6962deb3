"""The names of torch-hook-utils, on hookline: only the import changes.

- `get_layer_inputs`, `get_layer_outputs`: inputs and outputs of layers, as a dict by name
- `replace_layer_inputs`, `replace_layer_outputs`: other values there (`replace_layer_output` too)
- `save_maxpool_indices`, `use_indices_in_maxunpool`: from the pools of an encoder to a decoder
- `named_modules_of_type`: the layers of a type with their names
- `Lambda`, `Sample`, `Sequential`: layers of functions and distributions; `Module`, for annotations

Functions that act on layers are context managers, and leave nothing behind, not even after an
exception.
"""

from hookline.compat.torch_hook_utils.input_output_hooks import (
    get_layer_inputs,
    get_layer_outputs,
    replace_layer_inputs,
    replace_layer_output,
    replace_layer_outputs,
)
from hookline.compat.torch_hook_utils.layers import Lambda, Sample, Sequential
from hookline.compat.torch_hook_utils.maxpool_hooks import (
    save_maxpool_indices,
    use_indices_in_maxunpool,
)
from hookline.compat.torch_hook_utils.types import Module, named_modules_of_type

__all__ = [
    "Lambda",
    "Module",
    "Sample",
    "Sequential",
    "get_layer_inputs",
    "get_layer_outputs",
    "named_modules_of_type",
    "replace_layer_inputs",
    "replace_layer_output",
    "replace_layer_outputs",
    "save_maxpool_indices",
    "use_indices_in_maxunpool",
]
