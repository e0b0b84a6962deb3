"""The core: places, values, hooks, records, changes. Needs torch and the standard library only."""
