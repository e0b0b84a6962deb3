"""Changing: `edit` puts other values in the place of those that come, and back again.

To read it: `changes` (what is done to a value), `edits`, and `ready_changes`, which most edits are
made of. `parameters` and `restoring` are about what a model holds; `ready_slices` name parts.
"""
