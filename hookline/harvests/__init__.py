"""Store the values of a model over a data set: on one process, on many ranks, after a crash."""
