"""MiniCPM-V 4.6: SigLIP for images of any size, in slices if they are large, and Qwen 3.5, whose
positions count on through images. Videos are not taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families import qwen3_5
from shmllm.models.fields import Fields
from shmllm.models.readers import read_mlp
from shmllm.models.vision.fields import read_item_token, read_siglip, vision_fields
from shmllm.models.vision.specs import VisionSpec
from shmllm.models.vision.squares_specs import MiniCPMVTower

_MERGED = {"4x": 2, "16x": 4}
"""The side of the square of patches that becomes one embedding, by ``downsample_mode``."""


def configure(fields: Fields) -> ModelConfig:
    config = qwen3_5.configure_with(fields, read_mlp(fields), num_kv_heads=4)
    return replace(config, vision=read_vision(fields, config.vocab_size))


def read_vision(
    fields: Fields, vocab_size: int, model_type: str = "minicpmv4_6_vision", mode: str = "16x"
) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``.

    Args:
        fields: what `configure` got.
        vocab_size: the number of tokens.
        model_type: that of ``vision_config``.
        mode: the default of ``downsample_mode``.
    """
    vision, whole = vision_fields(fields, model_type), fields.whole
    if vision is None:
        return None
    if whole.values.get("image_token_id") is None:
        raise whole.error("image_token_id is missing: no token stands for an image")
    side = whole.meaning("downsample_mode", _MERGED, mode)
    for found, name, value in (
        (vision, "window_kernel_size", [2, 2]),
        (whole, "merge_kernel_size", [2, 2]),
        (whole, "merger_times", 1),
        (whole, "drop_vision_last_layer", False),
    ):
        _check(found, name, value)
    encoder = read_siglip(vision)
    layer = whole.integer("insert_layer_id", 6, minimum=0)
    if side == _MERGED["16x"] and layer >= encoder.num_layers:
        raise whole.error(
            f"insert_layer_id ({layer}) is none of the {encoder.num_layers} layers from 0"
        )
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), 0, vocab_size),
        tower=MiniCPMVTower(
            hidden_size=encoder.hidden_size,
            num_layers=encoder.num_layers,
            num_heads=encoder.num_heads,
            inner=encoder.inner,
            patch_size=encoder.patch_size,
            merge_size=side,
            activation=encoder.activation,
            table_side=encoder.side,
            merged_behind=layer if side == _MERGED["16x"] else None,
            eps=encoder.eps,
        ),
        merge_size=side,
    )


def _check(fields: Fields, name: str, supported: Any) -> None:
    value = fields.values.get(name)
    if value is not None and value != supported:
        raise fields.error(f"{name} {value!r} is not supported; supported: {supported!r}")
