"""Hooks at places: how they are put on, called and taken off, and what they find there.

To read it: `taps` (what is done with a value), `sites` (the hooks on one module), `contexts`
(entering and leaving) and `hooks`, the first verb, on which the others stand. `arms`, `gradients`
and `input_gradients` go on from there into the graph; `arguments`, `slices` and `attaching` are
small.

To be left for later, each about one thing that torch does: `operations` inside a forward,
`recomputation` by checkpoints, `compiling`, and `gathering` by FSDP.
"""
