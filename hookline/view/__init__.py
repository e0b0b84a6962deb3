"""Show what is inside a model: figures, one-file HTML pages, and a live view of a run.

- `hookline.view.figures`: figures for papers and notebooks, with matplotlib
- `hookline.view.reporting`: `report`, one self-contained file
- `hookline.view.server`: `serve`, the live view of a folder
"""
