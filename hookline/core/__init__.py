"""Places, hooks, captures, edits: all that the rest stands on; torch and the standard library only.

To read it: grammar, tree, targets and places (what is asked for), nested and snapshots (values),
taps, sites, hooks and contexts (how hooks are put on, called and taken off), keeping, captures and
records (looking), changes, slices and edits (changing), arms, gradients and input_gradients.

To be left for later: logs, gradient_logs and arrivals do what sites, keeping and gradients do in
the commonest cases, faster; recomputation, compiling, distributed, operations and parameters are
each about one thing that torch does; arguments and tables are small.
"""
