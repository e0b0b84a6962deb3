"""Change values: `edit` replaces values and restores the model afterwards.

Read `changes` first (what is done to a value), then `editing` and `ready_changes`. After that,
`parameter_swap` and `restoring` are about what a model holds, and `ready_slices` names parts.
"""
