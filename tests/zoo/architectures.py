"""Architectures of transformers, built offline from shrunken configs.

- `names()`: the architectures that run, as listed in architectures.txt
- `build(name)`: one of them with random weights, and the arguments of a forward
- `shrink(kind)`: a config of that type in which all that looks like a size is small

Nothing here knows an architecture but `PATCHES`, a few lines long. A config says which of its
fields are sizes by their names; a forward says by the names of its parameters what it takes.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported

LIST = Path(__file__).with_name("architectures.txt")
LENGTH = 12  # tokens in a sequence
WIDTH = 32
HEADS = 4
VOCABULARY = 128
IMAGE = 64
MOST_PARAMETERS = 12_000_000

PATCHES: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"max_length": 64, "num_mel_bins": 32},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "autoformer": {"prediction_length": 8},
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
    "informer": {"prediction_length": 8},
    "reformer": {"axial_pos_embds": False},
    "time_series_transformer": {"prediction_length": 8},
    "xmod": {"default_language": "en_XX"},
}


class CannotBuild(Exception):
    """No way of shrinking the config, and no set of arguments, gives a forward that runs."""


def names() -> list[str]:
    """The architectures that run."""
    return LIST.read_text().split()


# -- configs --------------------------------------------------------------------------------------

GROUPED = r"(key_value|kv)_(heads|groups)"

# The first rule whose pattern is found in a field's name says what becomes of its value; `n` is
# that value. Values up to 4 stay, but for layers.
RULES = [
    (r"^n_group$|^topk_group$", lambda n: min(n, 2)),
    (r"kernel|stride|ratio|dilation|_factor$|offset|padding|norm|loss|coeff|cost|_rate$|index$", None),
    (r"indexes$|indices$|_interval$|period|_step$|_every|_pattern$|^num_labels|^sampling", None),
    (r"num_mel_bins|in_channels|num_channels|_groups?$|channels_in|input_channels|levels", None),
    (r"layers?_to|layer_id|window_layers|vision_feature_layer|expert_layer", None),
    (r"type_vocab_size|chunk_size_feed|n_points|expand|_scale$|_length$|_seconds|_bits$", None),
    (r"(^|_)(layers?|blocks|depths?|n_layer|layer_num)$|_repeats", lambda n: min(n, 2)),
    (GROUPED, lambda n: 2),
    (r"heads?$|n_head", lambda n: HEADS),
    (r"head_dim|d_kv|head_size", lambda n: WIDTH // HEADS),
    (r"experts?_per|top_?k", lambda n: 2),
    (r"expert(s|_num)?$|expert_capacity", lambda n: 8),
    (r"vocab", lambda n: VOCABULARY),
    (r"image_size|img_size|input_size|pretrain_size", lambda n: IMAGE),
    (r"window_size", lambda n: 2),
    (r"patch_size|tubelet", None),
    (r"state_size|d_state|rank$|bottleneck", lambda n: 8),
    (r"source_positions|target_positions", lambda n: 64),
    (r"position", lambda n: 128),
    (r"quer(y|ies)|_tokens$|num_points|num_frames", lambda n: 8),
    (r"intermediate|ffn|feed_?forward|inner|d_ff|mlp", lambda n: 2 * WIDTH),
    (r"size|dim|width|d_model|embd|channels|units|hidden|filters|planes|feature", lambda n: WIDTH),
    (r"buckets|sliding_window|chunk|context|attention_window|local_att|block", lambda n: min(n, 16)),
]  # fmt: skip
TOKENS = re.compile(r"token_(id|index|ids)$|_token$|_id$|_index$")


def shrink(kind: type, ratio: int = 0, layers: int = 2, **patches: Any) -> dict[str, Any]:
    """The fields of a config to give, so that the model is small.

    With a ratio, widths are divided by it instead of made all the same: relations between them
    stay as they were.
    """
    changes: dict[str, Any] = {}
    tokens = itertools.count(3)
    inside = _parts(kind)
    for field in dataclasses.fields(kind):
        name = field.name
        if name in patches:
            changes[name] = patches[name]
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if name in inside:
            part = inside[name]
            changes[name] = {"model_type": part.model_type, **shrink(part, ratio, layers)}
        elif TOKENS.search(name) and type(default) is int:
            if default >= 3:
                changes[name] = next(tokens) if default >= 0 else default
        else:
            small = _smaller(name, default, ratio, layers)
            if small != default:
                changes[name] = small
            if re.search(GROUPED, name) and default == getattr(kind, "num_attention_heads", 0):
                changes[name] = HEADS  # not grouped
    return changes


def _parts(kind: Any) -> dict[str, Any]:
    """The types of the configs inside a config; the default ones where it could be any."""
    names = getattr(kind, "sub_configs", None)
    if not names:
        return {}
    try:
        made = kind()
    except Exception:
        return {name: part for name, part in names.items() if dataclasses.is_dataclass(part)}
    parts = {name: type(getattr(made, name, None)) for name in names}
    return {name: part for name, part in parts.items() if hasattr(part, "model_type")}


def _smaller(name: str, value: Any, ratio: int, layers: int) -> Any:
    if isinstance(value, (list, tuple)) and value and all(type(n) is int for n in value):
        return type(value)(_smaller_in_list(name, list(value), ratio, layers))
    if type(value) is not int:
        return value
    for pattern, rule in RULES:
        if re.search(pattern, name):
            if rule is None or (value <= 4 and "layer" not in pattern):
                return value
            if "layer" in pattern:
                return min(value, layers)
            wide = rule(value) >= WIDTH and rule(value) not in (VOCABULARY, IMAGE)
            if ratio and wide and "position" not in pattern:
                return max(8, value // ratio)
            return min(value, rule(value))
    return value


def _smaller_in_list(name: str, values: list[int], ratio: int, layers: int) -> list[int]:
    for pattern, rule in RULES:
        if re.search(pattern, name):
            if rule is None:
                return values
            if "layer" in pattern:
                return [min(n, 2) for n in values]
            if "heads" in pattern:
                return [min(n, 2) for n in values]
            if pattern.startswith(("size|", "intermediate")):
                if ratio:
                    return [max(8, n // ratio) for n in values]
                least = min(values)
                return [min(n, 16 * max(1, n // max(least, 1))) for n in values]
            return [min(n, rule(n)) for n in values]
    return values


# -- arguments ------------------------------------------------------------------------------------


def _first(config: Any, *fields: str, default: Any = None) -> Any:
    """The first of these fields that a config, or a part of it, has."""
    parts = [config, *(getattr(config, name) for name in getattr(config, "sub_configs", {}) or {})]
    for field in fields:
        for part in parts:
            value = getattr(part, field, None)
            if value is not None and not isinstance(value, bool):
                return value
    return default


class Arguments:
    """The arguments of a forward, made by the names of its parameters."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        self.config = config
        self.parameters = inspect.signature(model.forward).parameters
        self.main = getattr(model, "main_input_name", "input_ids")
        self.random = torch.Generator().manual_seed(0)

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def integers(self, high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self.random)

    def tokens(self, images: int = 0) -> Tensor:
        vocabulary = min(
            part.vocab_size
            for part in (self.config, getattr(self.config, "text_config", None))
            if isinstance(getattr(part, "vocab_size", None), int)
        ) if _first(self.config, "vocab_size") else VOCABULARY  # fmt: skip
        ids = self.integers(vocabulary, 2, LENGTH, low=min(60, vocabulary // 2))
        if images:
            token = _first(self.config, "image_token_id", "image_token_index", default=5)
            ids = torch.cat([torch.full((2, images), token), ids], 1)
        return ids

    def candidates(self) -> Iterator[dict[str, Tensor]]:
        """Sets of arguments to try, the fullest first."""
        config, names = self.config, self.parameters
        channels = _first(config, "num_channels", "in_channels", "in_chans", default=3)
        channels = channels if isinstance(channels, int) else 3
        size = _first(config, "image_size", default=IMAGE)
        size = size if isinstance(size, (tuple, list)) else (size, size)
        size = tuple(size)[-2:] if all(type(n) is int for n in size) else (IMAGE, IMAGE)
        frames = _first(config, "num_frames", default=2)
        frames = frames if isinstance(frames, int) else 2
        mels = _first(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim",
                      "feature_projection_input_dim", "input_channels", default=80)  # fmt: skip
        mels = mels if isinstance(mels, int) else 80
        positions = _first(config, "max_source_positions", default=32)
        text: list[dict[str, Tensor]] = [{}]
        if "input_ids" in names:
            ids = self.tokens()
            text = [{"input_ids": ids}]
            if "decoder_input_ids" in names:
                text.insert(0, {"input_ids": ids, "decoder_input_ids": self.tokens()})
            if "bbox" in names:
                corners = self.integers(50, 2, LENGTH, 2)
                text.insert(0, text[0] | {"bbox": torch.cat([corners, corners + 40], -1)})
        pictures = [
            self.floats(2, channels, *size),
            self.floats(2, frames, channels, *size),
            self.floats(2, channels, frames, *size),
            self.floats(2, 1, channels, *size),
        ]
        sounds = [
            self.floats(2, mels, 2 * positions),
            self.floats(2, 64, mels),
            self.floats(2, mels, 64),
            self.floats(2, 1, 64, mels),
            self.floats(2, _first(config, "max_length", default=1024), mels),
        ]
        waves = [self.floats(2, 4000), self.floats(2, 1, 4000)]
        decoder = [{"decoder_input_ids": self.tokens()}, {}] if "decoder_input_ids" in names else [{}]
        seen: list[dict[str, Tensor]] = []
        patch = _first(config, "patch_size", default=16)
        patches = (size[0] // patch) ** 2 if isinstance(patch, int) and patch else 16
        if "input_ids" in names and "pixel_values" in names:
            for count in (patches, patches // 4, patches + 1, patches // 16):
                if count:
                    seen += [{"input_ids": self.tokens(count), "pixel_values": pictures[0]}]
        if "pixel_values" in names:
            seen += [words | {"pixel_values": p} for p in pictures for words in (*text, {})]
            if decoder != [{}]:
                seen += [words | {"pixel_values": p} for p in pictures for words in decoder]
        for name in ("pixel_values_videos", "pixel_values_video"):
            if name in names:
                seen += [{name: p} for p in pictures[1:]]
        if self.main == "input_ids" and seen:  # a text model that may be shown pictures
            seen += text
        for name in ("input_features", "audio_features", "audio_values", "speech"):
            if name in names:
                seen += [words | {name: s} for s in sounds for words in (*text, *decoder)]
        for name in ("input_values", "waveform", "audio", "audio_input_values"):
            if name in names:
                seen += [words | {name: w} for w in waves for words in (*text, *decoder)]
                seen += [{name: s} for s in sounds]
        if not seen or self.main == "input_ids":
            seen += text
        yield from (one | self.others(one) for one in seen if one or "past_values" in names)
        yield from (one | self.required(one) for one in seen)

    def others(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Arguments that are always of use where a forward takes them."""
        more: dict[str, Tensor] = {}
        names, config = self.parameters, self.config
        if "past_values" in names:
            length = _first(config, "context_length", default=16)
            lags = getattr(config, "lags_sequence", None)
            length += max(lags) if lags else 0
            wide = _first(config, "num_input_channels", "input_size", default=1)
            shape = (2, length) if wide == 1 and lags else (2, length, wide)
            more["past_values"] = self.floats(*shape).abs()
            if "past_observed_mask" in names:
                more["past_observed_mask"] = torch.ones(shape)
            horizon = _first(config, "prediction_length", default=8)
            features = _first(config, "num_time_features", default=0)
            if "past_time_features" in names:
                more["past_time_features"] = self.floats(2, length, features)
            if "future_time_features" in names:
                more["future_time_features"] = self.floats(2, horizon, features)
            if "future_values" in names and "past_time_features" in names:
                more["future_values"] = self.floats(2, horizon, *shape[2:]).abs()
        return more | self.required(given | more)

    def required(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """A guess at each parameter that has no default."""
        more: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            if name in given or parameter.default is not parameter.empty:
                continue
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if "mask" in name:
                more[name] = torch.ones(2, LENGTH, dtype=torch.long)
            elif name in ("hidden_states", "inputs_embeds", "hidden_state"):
                width = _first(self.config, "hidden_size", "d_model", default=WIDTH)
                more[name] = self.floats(2, LENGTH, width)
            elif name.endswith("ids"):
                more[name] = self.tokens()
        return more


# -- models ---------------------------------------------------------------------------------------


def model_class(name: str) -> type:
    """The class without a head of a model type."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    found = MODEL_MAPPING_NAMES[name]
    return getattr(transformers, found if isinstance(found, str) else found[0])


def build(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """An architecture with random weights, and the arguments of a forward that runs."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name]
    cls = model_class(name)
    errors: list[str] = []
    for ratio, layers in ((0, 2), (0, 4), (0, 6), (16, 2), (8, 2)):
        try:
            torch.manual_seed(0)
            config = kind(**shrink(kind, ratio, layers, **PATCHES.get(name, {})))
            with torch.device("meta"):
                size = sum(p.numel() for p in cls(config).parameters())
            if size > MOST_PARAMETERS:
                raise CannotBuild(f"{size} parameters")
            torch.manual_seed(0)
            model = cls(config)
        except Exception as error:
            errors.append(f"build: {type(error).__name__}: {error}")
            continue
        model.train()
        for arguments in Arguments(model, config).candidates():
            try:
                torch.manual_seed(0)
                with torch.no_grad():
                    model(**arguments)
            except Exception as error:
                shapes = {k: tuple(v.shape) for k, v in arguments.items()}
                errors.append(f"run {shapes}: {type(error).__name__}: {error}")
            else:
                torch.manual_seed(0)
                return cls(config).train(), arguments
    raise CannotBuild("\n".join(error.replace("\n", " ")[:300] for error in errors))
