"""Old names, on hookline: change one import."""
