"""BLIP-2: an encoder, a Q-Former whose queries read it, and OPT."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.audio.conformer_specs import QFormer
from shmllm.models.config import ModelConfig
from shmllm.models.families import opt
from shmllm.models.families.opt import named_weights
from shmllm.models.fields import Fields
from shmllm.models.vision.blip_2_specs import Blip2Tower
from shmllm.models.vision.encoder_spec import EncoderSpec
from shmllm.models.vision.fields import (
    MOST_LAYERS,
    read_item_token,
    read_num_heads,
    read_vision_activation,
    vision_fields,
)
from shmllm.models.vision.specs import VisionSpec

__all__ = ["configure", "named_weights", "read_vision"]

_IMAGE_TOKEN = "image_token_index", "image_token_id"


def configure(fields: Fields) -> ModelConfig:
    config = opt.configure(fields)
    return replace(config, vision=read_vision(fields, config.vocab_size))


def read_vision(fields: Fields, vocab_size: int) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision, whole = vision_fields(fields, "blip_2_vision_model"), fields.whole
    if vision is None:
        return None
    if all(whole.values.get(name) is None for name in _IMAGE_TOKEN):
        raise whole.error(
            "image_token_index is missing, as in the first files of BLIP-2: write the id of the "
            "tokenizer's <image> there"
        )
    if not vision.flag("qkv_bias", True):
        raise vision.error("qkv_bias false is not supported; supported: true")
    encoder = _read_encoder(vision)
    reader = _read_reader(whole, encoder)
    return VisionSpec(
        image_token=read_item_token(fields, _IMAGE_TOKEN, 0, vocab_size),
        tower=Blip2Tower(encoder=encoder, reader=reader),
        tile_embeddings=reader.num_queries,
    )


def _read_encoder(vision: Fields) -> EncoderSpec:
    hidden_size = vision.integer("hidden_size", 1408)
    image_size = vision.integer("image_size", 224)
    patch_size = vision.integer("patch_size", 14, maximum=image_size)
    return EncoderSpec(
        kind="blip",
        hidden_size=hidden_size,
        num_layers=vision.integer("num_hidden_layers", 39, maximum=MOST_LAYERS),
        num_heads=read_num_heads(vision, "num_attention_heads", 16, hidden_size),
        inner=vision.integer("intermediate_size", 6144),
        image_size=image_size,
        patch_size=patch_size,
        activation=read_vision_activation(vision, "hidden_act", "gelu"),
        eps=vision.number("layer_norm_eps", 1e-6),
    )


def _read_reader(whole: Fields, encoder: EncoderSpec) -> QFormer:
    fields = Fields(whole.table("qformer_config"), f"{whole.where}: qformer_config")
    if (kind := fields.text("model_type", "blip_2_qformer")) != "blip_2_qformer":
        raise fields.error(f"model_type {kind!r} is not supported; supported: blip_2_qformer")
    if fields.flag("use_qformer_text_input", False):
        raise fields.error("use_qformer_text_input true is not supported; supported: false")
    hidden_size = fields.integer("hidden_size", 768)
    return QFormer(
        hidden_size=hidden_size,
        num_layers=fields.integer("num_hidden_layers", 12, maximum=MOST_LAYERS),
        num_heads=read_num_heads(fields, "num_attention_heads", 12, hidden_size),
        inner=fields.integer("intermediate_size", 3072),
        activation=read_vision_activation(fields, "hidden_act", "gelu"),
        eps=fields.number("layer_norm_eps", 1e-12),
        reads_every=fields.integer("cross_attention_frequency", 2),
        window=encoder.side**2 + 1,
        num_queries=whole.integer("num_query_tokens", 32),
    )
