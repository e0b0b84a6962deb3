"""A training, watched: what is measured, what is wrong, and the directory where it is kept."""
