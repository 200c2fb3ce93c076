"""LLaVA-NeXT-Video: LLaVA-NeXT, and videos of frames whose patches are pooled before the
projections."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import llava, llava_next
from shmllm.models.fields import Fields
from shmllm.models.vision.llava_specs import LlavaNextTower, LlavaNextVideoTower
from shmllm.models.vision.qwen_fields import ItemTokens, read_video
from shmllm.models.vision.specs import VisionSpec

_TOKENS = ItemTokens(32001, 32000)
_DEFAULTS = llava.Defaults(image_token=_TOKENS.image)
_TAKE_LARGEST = {"average": False, "max": True}


def configure(fields: Fields) -> ModelConfig:
    config = llava.read_text_model(fields)
    return replace(config, vision=read_vision(fields, config.vocab_size))


def read_vision(fields: Fields, vocab_size: int) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision, whole = llava_next.read_vision(fields, vocab_size, _DEFAULTS), fields.whole
    if vision is None:
        return None
    tower = vision.tower
    assert isinstance(tower, LlavaNextTower)
    side = tower.encoder.side
    stride = whole.integer("spatial_pool_stride", 2, maximum=side)
    video = read_video(
        fields, ("LlavaNextVideoVideoProcessor",), vocab_size, in_one_piece=True, tokens=_TOKENS
    )
    if video is not None:
        video = replace(video, frame_embeddings=(side // stride) ** 2)
    values = {each.name: getattr(tower, each.name) for each in dataclasses.fields(tower)}
    tower = LlavaNextVideoTower(
        **values,
        stride=stride,
        takes_largest=whole.meaning("spatial_pool_mode", _TAKE_LARGEST, "average"),
    )
    return replace(vision, tower=tower, video=video)
