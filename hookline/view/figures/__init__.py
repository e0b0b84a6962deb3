"""Figures for papers and notebooks, drawn with matplotlib (`pip install 'hookline[report]'`).

- `histograms`: the distribution of a value, or of a few
- `ridge`: the distributions of many layers, one above the other
- `along_layers`: where the values of each layer lie
- `gradient_flow`: how large the gradients of each layer are
- `feature_maps`: the channels of an image-like value
- `attention_maps`: what each head attends to
- `weights`: parameters, or any values, as matrices
- `over_steps`: layers × steps of a training run
- `effects`: what ablating or patching each place does
- `top_samples`: the samples with the largest activations of a unit

Each takes a source of values (a record, a store, statistics, a run, a model, a dict or a tensor)
and places, draws on the Axes `ax` or on a new figure, and returns the Figure. Figures are
independent of pyplot: there is nothing to close, and no global state changes. Notebooks show them,
and `figure.savefig("layers.pdf")` writes one.
"""

from hookline.view.figures.distribution_figures import histograms, ridge
from hookline.view.figures.layer_figures import along_layers, gradient_flow
from hookline.view.figures.map_figures import attention_maps, feature_maps
from hookline.view.figures.matrix_figures import effects, over_steps, weights
from hookline.view.figures.top_sample_figures import top_samples

__all__ = [
    "along_layers",
    "attention_maps",
    "effects",
    "feature_maps",
    "gradient_flow",
    "histograms",
    "over_steps",
    "ridge",
    "top_samples",
    "weights",
]
