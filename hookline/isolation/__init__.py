"""Runs that leave no trace, and the batches for them."""
