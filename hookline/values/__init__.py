"""Values as they are found in models: nested, spread over ranks, and kept as they were.

It imports nothing of ours. `nested` first; `snapshots` are what promise 3 stands on.
"""
