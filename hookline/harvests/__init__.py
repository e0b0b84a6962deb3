"""A model over a data set, values on disk: on one process, on many ranks, after a crash."""
