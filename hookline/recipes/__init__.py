"""Recipes: changes bound to places, which can be saved and put on any model."""
