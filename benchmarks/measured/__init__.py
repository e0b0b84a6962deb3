"""What was measured, as Markdown: each function makes one part of a document from one JSON file.

`PARTS` maps the name of a part to the file it is made of and to its function. One that gives lines
makes a table, one that gives a string makes words within a sentence.

The files are what the benchmarks write to results/. A field that is new in them does no harm; one
that is missing raises `KeyError`, which tables.py explains.
"""

from measured import costs, libraries, storage, training
from measured.parts import PARTS

__all__ = ["PARTS", "costs", "libraries", "storage", "training"]
