"""Statistics of values that come batch by batch, in constant memory, and `measure`."""
