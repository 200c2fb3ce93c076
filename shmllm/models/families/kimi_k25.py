"""Kimi K2.5 and Kimi-VL: MoonViT for images of any size, and DeepSeek-V3, whose positions count on
through images. Videos are not taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families import deepseek_v3
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import (
    MOST_LAYERS,
    check_channels,
    check_rotated_heads,
    read_item_token,
    read_num_heads,
    read_theta,
    read_vision_activation,
)
from shmllm.models.vision.specs import VisionSpec
from shmllm.models.vision.squares_specs import KimiTower

_LONGEST_SIDE = 512
"""The most patches in a row and in a column: so many rotations have the models of the authors."""
_TOKENS = "image_token_id", "media_placeholder_token_id"
_IMAGE_TOKEN = 163_605
_KINDS = "kimi_k25_vision", "kimi_k25", "moonvit"
_PUBLISHED = {
    "vt_hidden_size": "hidden_size",
    "vt_num_hidden_layers": "num_hidden_layers",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_intermediate_size": "intermediate_size",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "mm_hidden_size": "projection_hidden_size",
    "projector_ln_eps": "projection_layer_norm_eps",
}
"""What the files of the models' authors call fields of transformers' ``vision_config``, and those
of the projections."""
_BESIDE = "projection_hidden_size", "projection_layer_norm_eps"
"""The latter, which transformers has beside ``vision_config``."""
_ONE_VALUE = {
    "mm_projector_type": "patchmerger",
    "projector_hidden_act": "gelu",
    "pos_emb_type": "divided_fixed",
    "merge_type": "sd2_tpool",
}
"""Fields of the authors of which one value is computed."""


def configure(fields: Fields) -> ModelConfig:
    config = deepseek_v3.configure(fields)
    return replace(config, vision=read_vision(fields, config, is_k25=True))


def read_vision(fields: Fields, config: ModelConfig, *, is_k25: bool) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``.

    Args:
        fields: what `configure` got.
        config: that of the language model.
        is_k25: see `KimiTower`.
    """
    vision = _vision_fields(fields.whole)
    if vision is None:
        return None
    tower = _read_tower(vision, is_k25=is_k25)
    token = read_item_token(fields, _TOKENS, _IMAGE_TOKEN, config.vocab_size)
    return VisionSpec(image_token=token, tower=tower, merge_size=tower.merge_size)


def _vision_fields(whole: Fields) -> Fields | None:
    """Returns the fields of ``vision_config`` and of the projections under transformers' names."""
    values = whole.table("vision_config")
    if not values:
        return None
    beside = {name: whole.values[name] for name in _BESIDE if whole.values.get(name) is not None}
    renamed = {_PUBLISHED.get(name, name): value for name, value in values.items()}
    vision = Fields(beside | renamed, f"{whole.where}: vision_config")
    is_published = any(name.startswith("vt_") for name in values)
    if not is_published and (kind := vision.text("model_type", _KINDS[0])) not in _KINDS:
        raise vision.error(f"model_type {kind!r} is not supported; supported: {', '.join(_KINDS)}")
    for name, value in _ONE_VALUE.items():
        if (found := vision.text(name, value)) != value:
            raise vision.error(f"{name} {found!r} is not supported; supported: {value}")
    check_channels(vision)
    return vision


def _read_tower(vision: Fields, *, is_k25: bool) -> KimiTower:
    width = vision.integer("hidden_size", 1152)
    num_heads = read_num_heads(vision, "num_attention_heads", 16, width)
    check_rotated_heads(vision, width // num_heads)
    if (found := vision.integer("projection_hidden_size", width)) != width:
        raise vision.error(f"projection_hidden_size ({found}) differs from hidden_size ({width})")
    side = vision.integer("pos_emb_height", 64)
    if (columns := vision.integer("pos_emb_width", 64)) != side:
        raise vision.error(f"pos_emb_width ({columns}) differs from pos_emb_height ({side})")
    return KimiTower(
        hidden_size=width,
        num_layers=vision.integer("num_hidden_layers", 27, maximum=MOST_LAYERS),
        num_heads=num_heads,
        inner=vision.integer("intermediate_size", 4304),
        patch_size=vision.integer("patch_size", 14),
        merge_size=_read_merge_size(vision),
        activation=read_vision_activation(vision, "hidden_act", "gelu_pytorch_tanh"),
        theta=read_theta(vision),
        longest_side=_LONGEST_SIDE,
        table_side=side,
        projector_eps=vision.number("projection_layer_norm_eps", 1e-5),
        is_k25=is_k25,
    )


def _read_merge_size(vision: Fields) -> int:
    """Returns the side of a square of patches, of a field with both sides."""
    value: Any = vision.values.get("merge_kernel_size")
    sides = [2, 2] if value is None else value
    if not isinstance(sides, list) or len(sides) != 2 or sides[0] != sides[1]:
        raise vision.error(f"merge_kernel_size {value!r} is not supported, only [n, n] is")
    return Fields({"merge_kernel_size": sides[0]}, vision.where).integer("merge_kernel_size")
