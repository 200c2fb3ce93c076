"""GLM-OCR: an encoder for images of any size without a table of positions, and GLM-4 without
biases, whose heads rotate whole by three axes.

Its positions are triples, see `qwen2_5_vl`, and its videos are those of `glm4v`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families import glm4, glm4v
from shmllm.models.families.glm4 import named_weights
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import MOST_LAYERS, read_item_token, vision_fields
from shmllm.models.vision.qwen_fields import ItemTokens, read_qwen_tower, read_video, with_vision
from shmllm.models.vision.specs import VisionSpec
from shmllm.models.vision.squares_specs import GlmOcrTower

__all__ = ["configure", "named_weights", "read_vision"]

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 59_392,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
}
_VISION_DEFAULTS: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1024,
    "num_heads": 16,
    "out_hidden_size": 1536,
    "patch_size": 14,
    "hidden_act": "silu",
}
_TOKENS = ItemTokens(59_280, 59_281)
_CHANNELS = 3
_TIED = "tie_word_embeddings"


def configure(fields: Fields) -> ModelConfig:
    nested = Fields(fields.whole.table("text_config"), fields.where)
    tied = nested.flag(_TIED, False) or fields.whole.flag(_TIED, False)
    fields = fields.with_defaults(_DEFAULTS)
    if fields.flag("attention_bias", False):
        raise fields.error("attention_bias true is not supported; supported: false")
    head_dim = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    given = {_TIED: tied, "head_dim": fields.integer("head_dim", head_dim)}
    config = glm4.configure(fields.with_values(fields.values | given), partial=1.0)
    further = fields.integer("num_nextn_predict_layers", 0, minimum=0, maximum=MOST_LAYERS)
    config = replace(
        config,
        skipped_prefixes=tuple(
            f"model.layers.{config.num_layers + index}." for index in range(further)
        ),
    )
    return with_vision(
        config, fields, read_vision(fields, config), glm4v.SECTIONS, mixes_axes=False
    )


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision = vision_fields(fields, "glm_ocr_vision", "glm_ocr")
    if vision is None:
        return None
    shared = read_qwen_tower(vision, config.hidden_size, _VISION_DEFAULTS)
    token = read_item_token(fields, ("image_token_id",), _TOKENS.image, config.vocab_size)
    video = read_video(
        fields,
        glm4v.PROCESSORS[::-1],
        config.vocab_size,
        in_one_piece=False,
        tokens=_TOKENS,
    )
    return VisionSpec(
        image_token=token,
        tower=GlmOcrTower(
            **shared,
            inner=vision.integer("intermediate_size", 4096),
            bias=vision.flag("attention_bias", True),
            eps=vision.number("rms_norm_eps", 1e-5),
            merger_inner=_CHANNELS * config.hidden_size,
        ),
        merge_size=shared["merge_size"],
        has_axes=True,
        video=video and replace(video, token=token),
    )
