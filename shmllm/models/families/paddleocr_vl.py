"""PaddleOCR-VL: SigLIP for images of any size, rotated by rows and columns, projections of squares
of patches, and ERNIE 4.5 with three axes, in which the halves of heads rotate together.

Its positions are triples, see `qwen2_5_vl`.
"""

from __future__ import annotations

from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families import ernie4_5
from shmllm.models.fields import Fields
from shmllm.models.readers import FULL, read_layer_types
from shmllm.models.vision.fields import (
    MOST_LAYERS,
    check_rotated_heads,
    read_item_token,
    read_num_heads,
    read_theta,
    read_vision_activation,
    vision_fields,
)
from shmllm.models.vision.qwen_fields import with_vision
from shmllm.models.vision.specs import VisionSpec
from shmllm.models.vision.squares_specs import PaddleOcrVlTower

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 103_424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
}
_SECTIONS = (16, 24, 24)
_IMAGE_TOKEN = 100_295
_ALWAYS = ("use_3d_rope", "rope_is_neox_style")
"""Fields of published files that no code reads, and which describe what is computed."""


def configure(fields: Fields) -> ModelConfig:
    for name in _ALWAYS:
        if not fields.flag(name, True):
            raise fields.error(f"{name} false is not supported; supported: true")
    values = fields.values | {"tie_word_embeddings": _is_tied(fields)}
    fields = fields.with_values(values).with_defaults(_DEFAULTS)
    config = ernie4_5.configure(fields, interleaved=False)
    read_layer_types(fields, config.num_layers, (FULL,))
    return with_vision(config, fields, read_vision(fields, config), _SECTIONS, mixes_axes=False)


def _is_tied(fields: Fields) -> bool:
    """Whether the LM head shares the embedding table: files with a ``text_config`` say so there or
    beside it. Others are those of the authors, whose word counts: transformers unties them when it
    has read two tables."""
    name = "tie_word_embeddings"
    of_model = fields.whole.flag(name, True)
    nested = fields.whole.table("text_config")
    return of_model or (bool(nested) and Fields(nested, fields.where).flag(name, True))


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision = vision_fields(fields, "paddleocr_vl_vision", "paddleocr_vl")
    if vision is None:
        return None
    hidden_size = vision.integer("hidden_size", 1152)
    num_heads = read_num_heads(vision, "num_attention_heads", 16, hidden_size)
    check_rotated_heads(vision, hidden_size // num_heads)
    patch_size = vision.integer("patch_size", 14)
    image_size = vision.integer("image_size", 384, minimum=patch_size)
    merge_size = vision.integer("spatial_merge_size", 2)
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), _IMAGE_TOKEN, config.vocab_size),
        tower=PaddleOcrVlTower(
            hidden_size=hidden_size,
            num_layers=vision.integer("num_hidden_layers", 27, maximum=MOST_LAYERS),
            num_heads=num_heads,
            inner=vision.integer("intermediate_size", 4304),
            patch_size=patch_size,
            merge_size=merge_size,
            activation=read_vision_activation(vision, "hidden_act", "gelu_pytorch_tanh"),
            theta=read_theta(vision),
            num_positions=(image_size // patch_size) ** 2,
            eps=vision.number("layer_norm_eps", 1e-6),
        ),
        merge_size=merge_size,
        has_axes=True,
    )
