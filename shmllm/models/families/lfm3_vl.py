"""LFM3-VL: an encoder for images of any size with convolutions, a projection of squares of patches,
and LFM3. Positions of text count on through images."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import lfm3
from shmllm.models.families.lfm2 import CONVOLUTION
from shmllm.models.families.lfm3 import named_weights, other_names
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
from shmllm.models.vision.qwen_fields import ItemTokens, read_video
from shmllm.models.vision.specs import VisionSpec
from shmllm.models.vision.squares_specs import Lfm3VlTower

__all__ = ["configure", "named_weights", "other_names", "read_vision"]

_TIED = "tie_word_embeddings"
_TOKENS = ItemTokens(125_030, 125_029)


def configure(fields: Fields) -> ModelConfig:
    tied = fields.whole.flag(_TIED, True)  # that of the language model does not count
    config = lfm3.configure(fields.with_values(fields.values | {_TIED: tied}))
    return replace(config, vision=read_vision(fields, config.vocab_size))


def read_vision(fields: Fields, vocab_size: int) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision, whole = vision_fields(fields, "lfm3_vl_vision"), fields.whole
    if vision is None:
        return None
    hidden_size = vision.integer("hidden_size", 1024)
    num_layers = vision.integer("num_hidden_layers", 14, maximum=MOST_LAYERS)
    num_heads = read_num_heads(vision, "num_attention_heads", 16, hidden_size)
    check_rotated_heads(vision, hidden_size // num_heads)
    merge_size = vision.integer("spatial_merge_size", 2)
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), _TOKENS.image, vocab_size),
        tower=Lfm3VlTower(
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_read_num_kv_heads(vision, num_heads),
            inner=vision.integer("intermediate_size", 2560),
            patch_size=vision.integer("patch_size", 16),
            merge_size=merge_size,
            num_frames=vision.integer("temporal_patch_size", 2),
            activation="silu",
            theta=read_theta(vision, 1e6),
            full_layers=_read_full_layers(vision, num_layers),
            taps=_read_taps(vision),
            eps=vision.number("norm_eps", 1e-5),
            projector_inner=whole.integer("projector_hidden_size", 4096),
            projector_activation=read_vision_activation(whole, "projector_hidden_act", "gelu"),
            projector_bias=whole.flag("projector_bias", True),
        ),
        merge_size=merge_size,
        video=read_video(
            fields, ("Qwen3VLVideoProcessor",), vocab_size, in_one_piece=False, tokens=_TOKENS
        ),
    )


def _read_num_kv_heads(vision: Fields, num_heads: int) -> int:
    name = "num_key_value_heads"
    count = vision.integer(name, 8)
    if num_heads % count:
        raise vision.error(f"{name} ({count}) must divide num_attention_heads ({num_heads})")
    return count


def _read_full_layers(vision: Fields, num_layers: int) -> tuple[int, ...]:
    """Returns the layers with attention: by default every other one from the third on."""
    types = read_layer_types(vision, num_layers, (FULL, CONVOLUTION))
    if types is None:
        return tuple(range(2, num_layers, 2))
    return tuple(layer for layer, kind in enumerate(types) if kind == FULL)


def _read_taps(vision: Fields) -> int:
    taps = vision.integer("conv_kernel_size", 3)
    if taps % 2 == 0:
        raise vision.error(f"conv_kernel_size {taps} is not supported, only odd numbers are")
    return taps
