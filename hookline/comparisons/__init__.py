"""Compare two runs: of two models, or of one model that is changed place by place."""
