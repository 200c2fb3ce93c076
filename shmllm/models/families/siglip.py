"""SigLIP, and SigLIP 2 for images of one size: vectors of texts and of images, as CLIP. Tokens of a
text attend to all of it, and texts have padding (Zhai et al., 2023; Tschannen et al., 2025)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families.clip import named_weights, pooled_vision, read_texts
from shmllm.models.fields import Fields
from shmllm.models.head_specs import DenseSpec, HeadSpec
from shmllm.models.mixer_specs import AttentionSpec, MixerSpec
from shmllm.models.vision.fields import read_siglip, vision_fields
from shmllm.models.vision.specs import VisionSpec

__all__ = ["configure", "named_weights", "read_vision"]

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(_DEFAULTS)
    model = read_texts(fields, positions=64, activation="gelu_pytorch_tanh", eps=1e-6)
    width = fields.integer("projection_size", model.hidden_size)
    dense = DenseSpec(name="model.head", inputs=model.hidden_size, outputs=width, bias=True)
    return replace(
        model.with_mixers(_both_ways),
        head=HeadSpec(kind="projection", steps=(dense,)),
        vision=read_vision(fields, width),
        padding_token=fields.integer("pad_token_id", 1, minimum=0),
        skipped_prefixes=("logit_scale", "logit_bias"),
    )


def _both_ways(mixer: MixerSpec) -> MixerSpec:
    assert isinstance(mixer, AttentionSpec), "all layers have attention"
    return replace(mixer, ahead=None)


def read_vision(fields: Fields, width: int) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``.

    Args:
        fields: what `configure` got.
        width: that of the vectors of texts.
    """
    vision = vision_fields(fields, "siglip_vision_model")
    if vision is None:
        return None
    if not vision.flag("vision_use_head", True):
        raise vision.error("vision_use_head false is not supported: the head makes the vectors")
    encoder = read_siglip(vision)
    if encoder.hidden_size != width:
        raise vision.error(
            f"hidden_size ({encoder.hidden_size}) must be that of the vectors of texts, "
            f"projection_size ({width})"
        )
    return pooled_vision(encoder, width)
