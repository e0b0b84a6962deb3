"""Pictures of what is inside a model: one-file HTML pages, and the same page served while it grows.

- `hookline.pages.reporting`: `report`, one self-contained file
- `hookline.pages.serving`: `serve`, the live view of a folder
"""
