"""Values as they occur in models: nested, spread over ranks, and kept from later changes.

Read `nested` first. `snapshots` keeps captured values as they were.
"""
