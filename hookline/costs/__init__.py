"""Measure the costs of each module of a model: parameters, memory, FLOPs, time."""
