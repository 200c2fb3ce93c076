"""VideoLLaMA 3: SigLIP for images of any size, with rotations, a projection of each patch, and
Qwen 2, whose positions count on through images."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import qwen2
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import (
    MOST_LAYERS,
    check_rotated_heads,
    read_item_token,
    read_num_heads,
    read_side,
    read_theta,
    read_vision_activation,
    vision_fields,
)
from shmllm.models.vision.qwen_fields import TOKENS
from shmllm.models.vision.specs import VisionSpec
from shmllm.models.vision.video_llama_3_specs import VideoLlama3Tower

MERGE_SIZE = 1
"""That of images: the files of the image processor have it, and config.json does not."""


def configure(fields: Fields) -> ModelConfig:
    config = qwen2.configure(fields)
    return replace(config, vision=read_vision(fields, config.vocab_size))


def read_vision(fields: Fields, vocab_size: int) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``. Videos are not
    taken."""
    vision = vision_fields(fields, "video_llama_3_vision")
    if vision is None:
        return None
    hidden_size = vision.integer("hidden_size", 768)
    num_heads = read_num_heads(vision, "num_attention_heads", 12, hidden_size)
    check_rotated_heads(vision, hidden_size // num_heads)
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), TOKENS.image, vocab_size),
        tower=VideoLlama3Tower(
            hidden_size=hidden_size,
            num_layers=vision.integer("num_hidden_layers", 12, maximum=MOST_LAYERS),
            num_heads=num_heads,
            inner=vision.integer("intermediate_size", 3072),
            patch_size=read_side(vision, "patch_size", 16),
            merge_size=MERGE_SIZE,
            activation=read_vision_activation(vision, "hidden_act", "gelu_pytorch_tanh"),
            theta=read_theta(vision),
            eps=vision.number("layer_norm_eps", 1e-6),
        ),
        merge_size=MERGE_SIZE,
    )
