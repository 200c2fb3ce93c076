"""Granite 4 Vision: LLaVA-NeXT's tiles, whose features behind several layers are added to the
residual stream before several layers of Granite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.formats.joined_tiles import DEFAULT_SIZES
from shmllm.models.config import ModelConfig
from shmllm.models.families import granite, llava
from shmllm.models.families.llava_next import read_joined
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import (
    MOST_LAYERS,
    check_feature_layer,
    read_vision_activation,
)
from shmllm.models.vision.granite4_vision_specs import Granite4VisionTower, WindowsSpec
from shmllm.models.vision.specs import VisionSpec

_CORNERS = 4
_TARGETS = [12, 15, 18, 21]
_QFORMER: dict[str, Any] = {"num_hidden_layers": 1, "cross_attention_frequency": 1}
"""What the transformer has if config.json does not describe it."""
_HEAD_DIM = 64


def configure(fields: Fields) -> ModelConfig:
    config = granite.configure(fields)
    return replace(config, vision=read_vision(fields, config))


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``.

    Args:
        fields: what `configure` got.
        config: that of the language model.
    """
    whole = fields.whole
    layer = Fields(whole.values | {"vision_feature_layer": -1}, whole.where)
    vision = llava.read_vision(Fields(fields.values, fields.where, layer), config.vocab_size)
    if vision is None:
        return None
    joined = read_joined(whole, vision, DEFAULT_SIZES)
    encoder, pairs = joined["encoder"], _read_pairs(whole)
    means = tuple(check_feature_layer(whole, each, encoder.num_layers) for each, _ in pairs)
    last = whole.values.get("spatial_vision_layer")
    corners_of = check_feature_layer(whole, -1 if last is None else last, encoder.num_layers)
    joined["encoder"] = replace(encoder, num_layers=max(corners_of, *means))
    targets = [target for _, target in pairs] + _read_targets(whole)
    if len(set(targets)) < len(targets) or not all(0 <= t < config.num_layers for t in targets):
        raise whole.error(
            f"deepstack_layer_map and spatial_target_layers must name different layers below "
            f"{config.num_layers}, not {targets}"
        )
    places = sorted(set(targets) - {0})
    tower = Granite4VisionTower(
        **joined,
        windows=_read_windows(whole, encoder.hidden_size, encoder.side),
        means=means,
        corners=_CORNERS,
        corners_of=corners_of,
        order=(
            targets.index(0) if 0 in targets else -1,
            *(targets.index(place) for place in places),
        ),
        scale=1 / config.embeds_scale,
    )
    return replace(
        vision,
        tower=tower,
        tile_embeddings=tower.side**2,
        num_levels=len(places),
        level_layers=tuple(place - 1 for place in places),
    )


def _read_windows(whole: Fields, width: int, side: int) -> WindowsSpec:
    """Returns how features become fewer, for an encoder of this width and so many patches in a
    row."""
    rate = whole.text("downsample_rate", "")
    queries, _, window = rate.partition("/")
    sides = [int(each) if each.isascii() and each.isdigit() else 0 for each in (queries, window)]
    if not all(sides) or 2 * sides[0] != sides[1] or side % sides[1]:
        raise whole.error(
            f"downsample_rate {rate!r} is not supported; supported: n/m with m = 2 n, which "
            f"divides the {side} patches of a row"
        )
    if width % _HEAD_DIM:
        raise whole.error(f"the width of the tower ({width}) must be a multiple of {_HEAD_DIM}")
    given = whole.table("qformer_config")
    known = Fields(given or _QFORMER, f"{whole.where}: qformer_config")
    if (kind := known.text("model_type", "blip_2_qformer")) != "blip_2_qformer":
        raise known.error(f"model_type {kind!r} is not supported; supported: blip_2_qformer")
    if known.flag("use_qformer_text_input", False):
        raise known.error("use_qformer_text_input true is not supported; supported: false")
    return WindowsSpec(
        side=sides[1],
        queries=sides[0],
        hidden_size=width,
        num_layers=known.integer("num_hidden_layers", 12, maximum=MOST_LAYERS),
        num_heads=width // _HEAD_DIM,
        inner=known.integer("intermediate_size", 3072),
        activation=read_vision_activation(known, "hidden_act", "gelu"),
        eps=known.number("layer_norm_eps", 1e-12),
        reads_every=known.integer("cross_attention_frequency", 2),
    )


def _read_pairs(whole: Fields) -> list[tuple[Any, Any]]:
    """Returns ``deepstack_layer_map``: layers of the tower, and of the language model."""
    name = "deepstack_layer_map"
    pairs: Any = whole.values.get(name)
    is_list = isinstance(pairs, list) and bool(pairs)
    if not is_list or not all(isinstance(each, list) and len(each) == 2 for each in pairs):
        raise whole.error(f"{name!r} must list pairs of layers, not {pairs!r}")
    if any(type(layer) is not int for pair in pairs for layer in pair):
        raise whole.error(f"{name!r} must list pairs of layers, not {pairs!r}")
    return [(first, second) for first, second in pairs]


def _read_targets(whole: Fields) -> list[int]:
    name = "spatial_target_layers"
    found: Any = whole.values.get(name)
    targets = _TARGETS if found is None else found
    is_list = isinstance(targets, list) and len(targets) == _CORNERS
    if not is_list or any(type(each) is not int for each in targets):
        raise whole.error(f"{name!r} must list {_CORNERS} layers, not {targets!r}")
    return list(targets)
