"""Run models and leave no trace; make batches, call models, save random numbers."""
