"""Architectures of transformers, built offline from shrunken configs.

- `names()`: the architectures that run, as listed in architectures.txt
- `build(name)`: one of them with random weights, and the arguments of a forward
- `shrink(kind)`: what to give to a type of config so that the model is small
- `Arguments`: what a forward may be given, by the names of its parameters

Nothing here knows an architecture but `PATCHES`. A config says by the names of its fields which of
them are sizes; a forward says by the names of its parameters what it takes. What does not fit is
tried in another way; an architecture that fits in no way is not in the list.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported

LIST = Path(__file__).with_name("architectures.txt")
LENGTH = 12  # tokens in a sequence
WIDTH, HEADS, EXPERTS = 32, 4, 8
VOCABULARY = 128
IMAGE = 64  # pixels
MOST_PARAMETERS = 12_000_000

# What a config needs to be given beside small sizes.
PATCHES: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"max_length": 64, "num_mel_bins": 32},
    "autoformer": {"prediction_length": 8},
    "bamba": {"attn_layer_indices": [1]},
    "detr": {
        "use_timm_backbone": False,
        "backbone_config": {
            "model_type": "resnet",
            "embedding_size": 16,
            "hidden_sizes": (16, 32, 64, 128),
            "depths": (1, 1, 1, 1),
            "out_features": ["stage4"],
        },
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "informer": {"prediction_length": 8},
    "reformer": {
        "axial_pos_embds": False,
        "hash_seed": 0,  # else two runs of it differ, and so they do with dropout
        "hidden_dropout_prob": 0.0,
        "lsh_attention_probs_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0,
    },
    "time_series_transformer": {"prediction_length": 8},
    "xmod": {"default_language": "en_XX"},
}


class CannotBuild(Exception):
    """No way of shrinking the config, and no set of arguments, gives a forward that runs."""


def names() -> list[str]:
    """The architectures that run."""
    return LIST.read_text().split()


def build(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """An architecture with random weights, and the arguments of a forward that runs."""
    with warnings.catch_warnings(action="ignore"):
        return _build(name)


def _build(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    found = MODEL_MAPPING_NAMES[name]
    make: Any = getattr(transformers, found if isinstance(found, str) else found[0])
    kind = CONFIG_MAPPING[name]
    errors: list[str] = []
    for layers, ratio in ((2, 0), (4, 0), (6, 0), (2, 16), (2, 8)):
        try:
            config = kind(**shrink(kind, layers, ratio, PATCHES.get(name, {})))
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in make(config).parameters())
            if size > MOST_PARAMETERS:
                raise CannotBuild(f"{size} parameters")
            model = _seeded(make, config)
        except Exception as error:
            errors.append(f"build: {type(error).__name__}: {error}")
            continue
        for arguments in Arguments(model, config).candidates():
            torch.manual_seed(0)
            try:
                with torch.no_grad():
                    model(**arguments)
            except Exception as error:
                shapes = {name: tuple(value.shape) for name, value in arguments.items()}
                errors.append(f"run with {shapes}: {type(error).__name__}: {error}")
            else:
                return _seeded(make, config), arguments
    raise CannotBuild("\n".join(error.replace("\n", " ")[:300] for error in errors))


def _seeded(make: Callable[[Any], nn.Module], config: Any) -> nn.Module:
    torch.manual_seed(0)
    return make(config).train()


# -- configs --------------------------------------------------------------------------------------

LAYERS = r"(^|_)(layers?|blocks|depths?|n_layer)$"
GROUPED = r"(key_value|kv)_(heads|groups)"
HEAD_COUNT = r"heads?$|n_head"
INNER = r"intermediate|ffn|feed_?forward|inner|d_ff|mlp"
WIDE = r"size|dim|width|d_model|embd|channels|units|hidden|filters|planes|feature"

# The first pattern that is found in a field's name gives the most that it may be; None: as it is.
# Values up to 4 stay as they are.
MOST: list[tuple[str, int | None]] = [
    (r"^n_group$|^topk_group$", 2),
    (r"kernel|stride|ratio|dilation|_factor$|offset|padding|norm|loss|coeff|cost|_rate$", None),
    (r"index(es)?$|indices$|_interval$|period|_step$|_every|_pattern$|^num_labels|^sampling", None),
    (r"num_mel_bins|in_channels|num_channels|_groups?$|channels_in|input_channels|levels", None),
    (r"layers?_to|layer_id|window_layers|vision_feature_layer|expert_layer", None),
    (r"type_vocab_size|chunk_size_feed|n_points|expand|_scale$|_length$|_seconds|_bits$", None),
    (LAYERS, 2),
    (GROUPED, 2),
    (HEAD_COUNT, HEADS),
    (r"head_dim|d_kv|head_size", WIDTH // HEADS),
    (r"experts?_per|top_?k", 2),
    (r"expert(s|_num)?$|expert_capacity", EXPERTS),
    (r"vocab", VOCABULARY),
    (r"image_size|img_size|input_size|pretrain_size", IMAGE),
    (r"window_size", 2),
    (r"patch_size|tubelet", None),
    (r"state_size|d_state|rank$|bottleneck", 8),
    (r"source_positions|target_positions", 64),
    (r"position", 128),
    (r"quer(y|ies)|_tokens$|num_points|num_frames", 8),
    (INNER, 2 * WIDTH),
    (WIDE, WIDTH),
    (r"buckets|sliding_window|chunk|context|attention_window|local_att|block", 16),
]
TOKEN = re.compile(r"token_(id|index|ids)$|_token$|_id$|_index$")


def shrink(kind: Any, layers: int = 2, ratio: int = 0, patches: Any = ()) -> dict[str, Any]:
    """The fields to give to a type of config, so that the model is small.

    With a ratio, widths are divided by it instead of made all the same: relations between them
    stay as they were.
    """
    changes: dict[str, Any] = {}
    tokens = itertools.count(3)  # special ones: distinct, and in the vocabulary
    inside = _inside(kind)
    for field in dataclasses.fields(kind):
        name, value = field.name, field.default
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        if name in inside:
            part = inside[name]
            changes[name] = {"model_type": part.model_type, **shrink(part, layers, ratio)}
        elif TOKEN.search(name) and type(value) is int:
            changes[name] = next(tokens) if value >= 3 else value
        elif re.search(GROUPED, name) and value == getattr(kind, "num_attention_heads", None):
            changes[name] = HEADS  # not grouped
        elif type(value) is int:
            changes[name] = _smaller(name, value, layers, ratio)
        elif isinstance(value, (list, tuple)) and value and all(type(n) is int for n in value):
            changes[name] = type(value)(_all_smaller(name, value, layers, ratio))
    return {**changes, **dict(patches)}


def _inside(kind: Any) -> dict[str, Any]:
    """The types of the configs inside a config; the default ones where it could be any."""
    fields = getattr(kind, "sub_configs", None)
    if not fields:
        return {}
    try:
        made = kind()
    except Exception:
        return {name: part for name, part in fields.items() if dataclasses.is_dataclass(part)}
    parts = {name: type(getattr(made, name, None)) for name in fields}
    return {name: part for name, part in parts.items() if hasattr(part, "model_type")}


def _rule(name: str) -> tuple[str, int | None]:
    return next((rule for rule in MOST if re.search(rule[0], name)), ("", None))


def _smaller(name: str, value: int, layers: int, ratio: int) -> int:
    pattern, most = _rule(name)
    if pattern == LAYERS:
        return min(value, layers)
    if most is None or value <= 4:
        return value
    if ratio and pattern in (INNER, WIDE):
        return max(8, value // ratio)
    return min(value, most)


def _all_smaller(name: str, values: Any, layers: int, ratio: int) -> list[int]:
    """A list has one number for each stage: widths grow from stage to stage as they did."""
    pattern, most = _rule(name)
    if most is None:
        return list(values)
    if pattern in (LAYERS, HEAD_COUNT):
        return [min(n, 2) for n in values]
    if pattern in (INNER, WIDE):
        if ratio:
            return [max(8, n // ratio) for n in values]
        least = max(min(values), 1)
        return [min(n, WIDTH // 2 * max(1, n // least)) for n in values]
    return [min(n, most) for n in values]


# -- arguments ------------------------------------------------------------------------------------


class Arguments:
    """What a forward may be given, made by the names of its parameters."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        self.parameters = inspect.signature(model.forward).parameters
        self.random = torch.Generator().manual_seed(0)
        inside = getattr(config, "sub_configs", None) or {}
        self.configs = [config, *(getattr(config, name, None) for name in inside)]

    def candidates(self) -> Iterator[dict[str, Tensor]]:
        """Sets of arguments to try, the fullest first."""
        texts = self.texts()
        media = [*self.pictures(), *self.sounds(), *self.series()]
        for given in (*self.illustrated(), *(m | t for m in media for t in (*texts, {})), *texts):
            yield given | self.guessed(given)
        yield self.guessed({})

    def number(self, *fields: str, default: int) -> int:
        """The first of these fields that is an int in the config or in a config inside it."""
        for field in fields:
            for config in self.configs:
                value = getattr(config, field, None)
                if type(value) is int:
                    return value
        return default

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.random)

    def tokens(self) -> Tensor:
        known = [getattr(config, "vocab_size", None) for config in self.configs]
        most = min((size for size in known if type(size) is int), default=VOCABULARY)
        return self.integers(min(60, most // 2), most, 2, LENGTH)  # no special ones

    def texts(self) -> list[dict[str, Tensor]]:
        names = self.parameters
        texts: list[dict[str, Tensor]] = []
        if "decoder_input_ids" in names:
            texts.append({"decoder_input_ids": self.tokens()})
        if "input_ids" in names:
            ids = {"input_ids": self.tokens()}
            texts = [ids | texts[0], *texts, ids] if texts else [ids]
        if "bbox" in names:
            corners = self.integers(0, 50, 2, LENGTH, 2)
            texts.insert(0, {**texts[0], "bbox": torch.cat([corners, corners + 40], -1)})
        return texts

    def picture(self) -> tuple[int, int, int]:
        size = next((size for c in self.configs if (size := getattr(c, "image_size", None))), IMAGE)
        height, width = size[-2:] if isinstance(size, (list, tuple)) else (size, size)
        return self.number("num_channels", "in_channels", "in_chans", default=3), height, width

    def pictures(self) -> Iterator[dict[str, Tensor]]:
        channels, *size = self.picture()
        frames = self.number("num_frames", default=2)
        for name in ("pixel_values", "pixel_values_videos"):
            if name in self.parameters:
                yield {name: self.floats(2, channels, *size)}
                yield {name: self.floats(2, frames, channels, *size)}
                yield {name: self.floats(2, channels, frames, *size)}
                yield {name: self.floats(2, 1, channels, *size)}

    def illustrated(self) -> Iterator[dict[str, Tensor]]:
        """Text in which pictures stand: as many special tokens as a picture may become."""
        if not {"input_ids", "pixel_values"} <= set(self.parameters):
            return
        picture = self.floats(2, *self.picture())
        patches = (picture.shape[-1] // self.number("patch_size", default=16)) ** 2
        token = self.number("image_token_id", "image_token_index", default=5)
        for count in (patches, patches // 4, patches + 1, patches // 16):
            if count:
                ids = torch.cat([torch.full((2, count), token), self.tokens()], 1)
                yield {"input_ids": ids, "pixel_values": picture}

    def sounds(self) -> Iterator[dict[str, Tensor]]:
        bins = self.number(
            "num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim",
            "feature_projection_input_dim", "input_channels", default=80,
        )  # fmt: skip
        length = 2 * self.number("max_source_positions", default=32)
        most = self.number("max_length", default=1024)
        spectra = [(bins, length), (64, bins), (bins, 64), (1, 64, bins), (most, bins)]
        for name in ("input_values", "input_features"):
            if name in self.parameters:
                waves = [(4000,), (1, 4000)] if name == "input_values" else []
                for shape in (*waves, *spectra):
                    yield {name: self.floats(2, *shape)}

    def series(self) -> Iterator[dict[str, Tensor]]:
        if "past_values" not in self.parameters:
            return
        lags = getattr(self.configs[0], "lags_sequence", None)
        length = self.number("context_length", default=16) + (max(lags) if lags else 0)
        ahead = self.number("prediction_length", default=8)
        channels = self.number("num_input_channels", "input_size", default=1)
        more = () if lags and channels == 1 else (channels,)
        features = self.number("num_time_features", default=0)
        known = {
            "past_values": self.floats(2, length, *more).abs(),
            "past_observed_mask": torch.ones(2, length, *more),
            "past_time_features": self.floats(2, length, features),
            "future_time_features": self.floats(2, ahead, features),
        }
        if lags:
            known["future_values"] = self.floats(2, ahead, *more).abs()
        yield {name: value for name, value in known.items() if name in self.parameters}

    def guessed(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """The parameters that have no default, as their names tell."""
        guesses: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            needed = parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD,
            )  # fmt: skip
            if needed and name not in given:
                if "mask" in name:
                    guesses[name] = torch.ones(2, LENGTH, dtype=torch.long)
                elif name in ("hidden_states", "inputs_embeds"):
                    width = self.number("hidden_size", "d_model", default=WIDTH)
                    guesses[name] = self.floats(2, LENGTH, width)
                elif name.endswith("ids"):
                    guesses[name] = self.tokens()
        return guesses
