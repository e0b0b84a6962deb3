"""torchinfo, as in its README: `summary`."""

from __future__ import annotations

import torchinfo

PACKAGE = "torchinfo"
TITLE = "torchinfo"
SOURCE = "README of 1.8.0"
NOTES = {"summary": "shapes, parameters and multiply-adds; depth=10, to show all modules"}
ABSENT = dict.fromkeys(
    (
        "capture", "calls", "inputs", "edit", "gradient", "stop", "operation", "generate",
        "to_disk", "edit_parameter",
    ),
    "summaries only",
)  # fmt: skip


def summary(model):
    columns = ("input_size", "output_size", "num_params", "mult_adds")

    def run(*args):
        found = torchinfo.summary(
            model, input_data=list(args), depth=10, col_names=columns, verbose=0
        )
        return str(found)

    return run
