"""dots.ocr: an encoder for images of any size, and Qwen 2, whose positions count on through images.

Its authors publish it beside code of their own, with the fields of the language model outermost.
The defaults are those of the configuration classes in vLLM.
"""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import qwen2
from shmllm.models.fields import Fields
from shmllm.models.vision.dots_ocr_specs import DotsOcrTower
from shmllm.models.vision.fields import (
    MOST_LAYERS,
    check_rotated_heads,
    read_item_token,
    read_num_heads,
    vision_fields,
)
from shmllm.models.vision.specs import VisionSpec

IMAGE_TOKEN = 151_665
_THETA = 10_000.0


def configure(fields: Fields) -> ModelConfig:
    if not fields.flag("attention_bias", True):
        raise fields.error("attention_bias false is not supported; supported: true")
    config = qwen2.configure(fields)
    return replace(config, vision=read_vision(fields, config))


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``, in which
    ``hidden_size`` is the width of the embeddings and ``embed_dim`` that of the stream."""
    vision = vision_fields(fields, "dots_vit")
    if vision is None:
        return None
    if vision.flag("is_causal", False):
        raise vision.error("is_causal true is not supported; supported: false")
    for name, default, needed in (
        ("temporal_patch_size", 1, 1),
        ("hidden_size", 1536, config.hidden_size),
    ):
        if (found := vision.integer(name, default)) != needed:
            raise vision.error(f"{name} {found} is not supported; supported: {needed}")
    width = vision.integer("embed_dim", 1536)
    num_heads = read_num_heads(vision, "num_attention_heads", 12, width, "embed_dim")
    check_rotated_heads(vision, width // num_heads)
    merge_size = vision.integer("spatial_merge_size", 2)
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), IMAGE_TOKEN, config.vocab_size),
        tower=DotsOcrTower(
            hidden_size=width,
            num_layers=vision.integer("num_hidden_layers", 42, maximum=MOST_LAYERS),
            num_heads=num_heads,
            inner=vision.integer("intermediate_size", 4224),
            patch_size=vision.integer("patch_size", 14),
            merge_size=merge_size,
            activation="silu",
            theta=_THETA,
            bias=vision.flag("use_bias", False),
            eps=vision.number("rms_norm_eps", 1e-5),
            has_last_norm=vision.flag("post_norm", True),
        ),
        merge_size=merge_size,
    )
