"""What each module of a model costs: parameters, memory, FLOPs, time."""
