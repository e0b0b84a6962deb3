"""Looking: `capture` keeps the values at places in a `Record`.

To read it: `keeping` (what is kept of a value), `captures` and `records`.

To be left for later: `logs`, `gradient_logs` and `arrivals` do the same in the commonest cases,
faster. Without them all would work as it does, but for the time.
"""
