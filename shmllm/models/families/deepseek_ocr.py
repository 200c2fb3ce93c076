"""DeepSeek-OCR: SAM's encoder, CLIP, which reads what it makes of an image, and the language model
of DeepSeek-OCR 2. config.json is in the terms of `formats.deepseek_ocr`."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_ocr2 import IMAGE_TOKEN, read_halved, read_text_model, section
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import MOST_LAYERS, read_clip, read_item_token, vision_fields
from shmllm.models.vision.sam_specs import DeepseekOcrTower
from shmllm.models.vision.specs import VisionSpec

_CLIP = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 14,
}


def configure(fields: Fields) -> ModelConfig:
    model = read_text_model(fields)
    further = fields.integer("num_nextn_predict_layers", 0, minimum=0, maximum=MOST_LAYERS)
    behind = range(model.num_layers, model.num_layers + further)  # they predict further tokens
    return replace(
        model,
        skipped_prefixes=tuple(f"model.layers.{layer}." for layer in behind),
        vision=read_vision(fields, model.vocab_size),
    )


def read_vision(fields: Fields, vocab_size: int) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision = vision_fields(fields, "unlimited_ocr_vision")
    if vision is None:
        return None
    clip = section(vision, "encoder_config", "unlimited_ocr_vision_encoder").with_defaults(_CLIP)
    encoder = read_clip(clip)
    sam = section(vision, "sam_config", "unlimited_ocr_sam_vision_model")
    sam = sam.with_defaults({"downsample_channels": [512, 1024]})
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), IMAGE_TOKEN, vocab_size),
        tower=DeepseekOcrTower(**read_halved(sam, encoder.hidden_size), clip=encoder),
    )
