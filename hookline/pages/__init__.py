"""Pictures of what is inside a model: figures, one-file HTML pages, and a page that follows a run.

- `hookline.pages.figures`: figures for papers and notebooks, with matplotlib
- `hookline.pages.reporting`: `report`, one self-contained file
- `hookline.pages.serving`: `serve`, the live view of a folder
"""
