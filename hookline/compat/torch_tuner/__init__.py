"""TorchTuner's `Hooks`: save the values that pass through a layer, and change them.

    from torch_tuner import Hooks                  # before
    from hookline.compat.torch_tuner import Hooks  # after

- `Hooks(model, layer)`: registers the four kinds of hooks at a layer, or at several
- `Handle`: the result of a registration; `remove()` ends it

Values and file names are those of torch-tuner 0.1.0. New are: a layer by name, object or index,
several layers, `update` and `visualize` together, the shapes of all layers. These differ:

- Nothing is printed. Printed refusals are errors: neither `update` nor `visualize`, an update
  without noise and values. So are values of a wrong shape.
- Each registration has its own noise and values; they neither outlive it nor reach others.
- All inputs and gradients are saved, not the first only, also arguments passed by name. An update
  of the first input leaves the others as they are.
- Saved tensors do not require grad, and are as they were when the layer was called, also before
  modules that change their input in place, where torch's full backward hooks fail.
- Values that checkpointing computes a second time are saved once.
"""

from hookline.compat.torch_tuner.handles import Handle
from hookline.compat.torch_tuner.registrations import Hooks

__all__ = ["Handle", "Hooks"]
