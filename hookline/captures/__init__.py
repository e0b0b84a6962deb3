"""Capture values: `capture` keeps the values at places in a `Record`.

Read `capturing` first, then `keeping` (how values are stored), `record`, and `entries` (the calls
of one place in order).
"""
