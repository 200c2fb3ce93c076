"""GOT-OCR 2: SAM's encoder, convolutions and a projection behind it, and Qwen 2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families import llava
from shmllm.models.fields import Fields
from shmllm.models.vision.encoder_spec import SamSpec
from shmllm.models.vision.fields import (
    MOST_LAYERS,
    read_item_token,
    read_num_heads,
    read_vision_activation,
    vision_fields,
)
from shmllm.models.vision.sam_specs import GotOcr2Tower
from shmllm.models.vision.specs import VisionSpec

_TIED = "tie_word_embeddings"
_EVERY_FOURTH = (2, 5, 8, 11)


def configure(fields: Fields) -> ModelConfig:
    tied = fields.whole.flag(_TIED, True)  # that of the language model does not count
    config = llava.read_text_model(fields.with_values(fields.values | {_TIED: tied}), "qwen2")
    return replace(config, vision=read_vision(fields, config.vocab_size))


def read_vision(fields: Fields, vocab_size: int) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision = vision_fields(fields, "got_ocr2_vision", "")
    if vision is None:
        return None
    tower = GotOcr2Tower(**read_sam(vision))
    names = ("image_token_index", "image_token_id")
    return VisionSpec(
        image_token=read_item_token(fields, names, 151_859, vocab_size),
        tower=tower,
        tile_embeddings=tower.out_side**2,
    )


def read_sam(vision: Fields) -> dict[str, Any]:
    """Returns the attributes of a `SamTower`."""
    return {
        "encoder": _read_encoder(vision),
        "window": vision.integer("window_size", 14),
        "full_layers": _read_full_layers(vision),
        "qkv_bias": vision.flag("qkv_bias", True),
        "has_positions": vision.flag("use_abs_pos", True),
        "has_distances": vision.flag("use_rel_pos", True),
        "neck": vision.integer("output_channels", 256),
    }


def _read_encoder(vision: Fields) -> SamSpec:
    hidden_size = vision.integer("hidden_size", 768)
    patch_size = vision.integer("patch_size", 16)
    image_size = vision.integer("image_size", 1024, minimum=patch_size)
    return SamSpec(
        kind="sam",
        hidden_size=hidden_size,
        num_layers=vision.integer("num_hidden_layers", 12, maximum=MOST_LAYERS),
        num_heads=read_num_heads(vision, "num_attention_heads", 12, hidden_size),
        inner=vision.integer("mlp_dim", 3072),
        image_size=image_size,
        patch_size=patch_size,
        activation=read_vision_activation(vision, "hidden_act", "gelu"),
        eps=vision.number("layer_norm_eps", 1e-6),
        final_norm=False,
    )


def _read_full_layers(vision: Fields) -> tuple[int, ...]:
    """Returns ``global_attn_indexes``, of which those behind the last layer mean nothing."""
    found = vision.values.get("global_attn_indexes")
    layers = list(_EVERY_FOURTH) if found is None else found
    if not isinstance(layers, list) or any(type(each) is not int for each in layers):
        raise vision.error(f"'global_attn_indexes' must be a list of layers, not {layers!r}")
    return tuple(layers)
