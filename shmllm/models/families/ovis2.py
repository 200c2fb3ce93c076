"""Ovis 2: AIMv2's encoder, a table of embeddings of visual words, and Qwen 2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families import llava
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import (
    MOST_LAYERS,
    read_item_token,
    read_num_heads,
    read_vision_activation,
    vision_fields,
)
from shmllm.models.vision.ovis2_specs import Ovis2Tower, VisualWordsSpec
from shmllm.models.vision.specs import VisionSpec

_TIED = "tie_word_embeddings"
_MARKS = 5
_TOKENS = list(range(151_666, 151_666 + _MARKS))


def configure(fields: Fields) -> ModelConfig:
    whole = fields.whole
    tied = whole.flag(_TIED, True)  # that of the language model does not count
    config = llava.read_text_model(fields.with_values(fields.values | {_TIED: tied}), "qwen2")
    for name, default in (("vocab_size", 151_643), ("hidden_size", 1536)):
        if (found := whole.integer(name, default)) != getattr(config, name):
            raise whole.error(
                f"{name} ({found}) differs from that of text_config ({getattr(config, name)})"
            )
    return replace(config, vision=read_vision(fields, config.vocab_size))


def read_vision(fields: Fields, vocab_size: int) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision, whole = vision_fields(fields, "ovis2_vision"), fields.whole
    if vision is None:
        return None
    how = vision.text("tokenize_function", "softmax")
    if how != "softmax":
        raise vision.error(f"tokenize_function {how!r} is not supported; supported: 'softmax'")
    if (count := vision.integer("num_visual_indicator_tokens", _MARKS)) != _MARKS:
        raise vision.error(f"num_visual_indicator_tokens {count} is not supported; supported: 5")
    marks: Any = whole.values.get("visual_indicator_token_ids") or _TOKENS
    if (
        not isinstance(marks, list)
        or len({*map(str, marks)}) != _MARKS
        or not all(type(each) is int and 0 <= each < vocab_size for each in marks)
    ):
        raise whole.error(
            f"'visual_indicator_token_ids' must be {_MARKS} tokens of a vocabulary of "
            f"{vocab_size}, not {marks!r}"
        )
    return VisionSpec(
        image_token=read_item_token(fields, ("image_token_id",), 151_665, vocab_size),
        tower=Ovis2Tower(
            encoder=_read_encoder(vision),
            qkv_bias=vision.flag("qkv_bias", False),
            mlp_bias=vision.flag("mlp_bias", False),
        ),
    )


def _read_encoder(vision: Fields) -> VisualWordsSpec:
    hidden_size = vision.integer("hidden_size", 1024)
    patch_size = vision.integer("patch_size", 14)
    encoder = VisualWordsSpec(
        kind="aimv2",
        hidden_size=hidden_size,
        num_layers=vision.integer("num_hidden_layers", 24, maximum=MOST_LAYERS),
        num_heads=read_num_heads(vision, "num_attention_heads", 8, hidden_size),
        inner=vision.integer("intermediate_size", 2816),
        image_size=vision.integer("image_size", 224, minimum=patch_size),
        patch_size=patch_size,
        activation=read_vision_activation(vision, "hidden_act", "silu"),
        eps=vision.number("rms_norm_eps", 1e-5),
        num_words=vision.integer("vocab_size", 16_384, minimum=_MARKS + 1) - _MARKS,
        factor=vision.integer("hidden_stride", 1),
    )
    if encoder.side % encoder.factor:
        raise vision.error(
            f"hidden_stride ({encoder.factor}) must divide the {encoder.side} patches of a row"
        )
    return encoder
