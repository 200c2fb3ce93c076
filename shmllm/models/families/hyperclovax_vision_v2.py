"""HyperCLOVA X SEED Think 32B: the tower of Qwen 2.5 VL with one more projection behind it, and
HyperCLOVA X, whose positions count on through images."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import hyperclovax
from shmllm.models.families.qwen2_5_vl import read_tower
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import read_item_token, vision_fields
from shmllm.models.vision.specs import VisionSpec

_TIED = "tie_word_embeddings"
IMAGE_TOKEN = 128_060


def configure(fields: Fields) -> ModelConfig:
    tied = fields.whole.flag(_TIED, True)  # that of the language model does not count
    config = hyperclovax.configure(fields.with_values(fields.values | {_TIED: tied}))
    return replace(config, vision=read_vision(fields, config.vocab_size))


def read_vision(fields: Fields, vocab_size: int) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``. Videos are not
    taken."""
    vision = vision_fields(fields, "qwen2_5_vl_vision", "qwen2_5_vl")
    if vision is None:
        return None
    width = vision.integer("out_hidden_size", 3584)
    tower = replace(read_tower(vision, width), merged_width=width)
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), IMAGE_TOKEN, vocab_size),
        tower=tower,
        merge_size=tower.merge_size,
    )
