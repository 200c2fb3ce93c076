"""LLaVA-OneVision: LLaVA-NeXT with SigLIP, which shrinks large pictures. Among several images each
has one tile."""

from __future__ import annotations

from dataclasses import replace

from shmllm.formats.joined_tiles import ONEVISION_SIZES, read_most_tiles
from shmllm.models.config import ModelConfig
from shmllm.models.families import llava, llava_next
from shmllm.models.fields import Fields
from shmllm.models.vision.llava_specs import LlavaOnevisionTower
from shmllm.models.vision.qwen_fields import ItemTokens, read_video
from shmllm.models.vision.specs import VisionSpec

_TIED = "tie_word_embeddings"
_TOKENS = ItemTokens(151_646, 151_647)
_DEFAULTS = llava.Defaults(
    towers=("siglip_vision_model", "clip_vision_model"),
    strategy="full",
    layer=-1,
    image_token=_TOKENS.image,
)


def configure(fields: Fields) -> ModelConfig:
    config = llava.read_text_model(fields, "qwen2")
    text = fields.whole.section("text_config", fields.text("model_type", "qwen2"))
    tied = config.tie_word_embeddings or (text is not None and text.flag(_TIED, False))
    vision = read_vision(fields, config.vocab_size)
    return replace(config, tie_word_embeddings=tied, vision=vision)


def read_vision(fields: Fields, vocab_size: int) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision, whole = llava.read_vision(fields, vocab_size, _DEFAULTS), fields.whole
    if vision is None:
        return None
    values = llava_next.read_joined(whole, vision, ONEVISION_SIZES)
    ratio = whole.values.get("vision_aspect_ratio")
    most = read_most_tiles(ratio)
    if most is None:
        raise whole.error(
            f"vision_aspect_ratio {ratio!r} is not supported; supported: anyres_max_N"
        )
    tower = LlavaOnevisionTower(**values | {"most_tiles": most})
    half = -(-tower.encoder.side // 2)
    video = read_video(
        fields, ("LlavaOnevisionVideoProcessor",), vocab_size, in_one_piece=True, tokens=_TOKENS
    )
    if video is not None:
        video = replace(video, frame_embeddings=half**2, num_behind=1)
    return replace(vision, tower=tower, video=video)
