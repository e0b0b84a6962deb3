"""Watch a training: measure it, find what is wrong, write and read its run directory."""
