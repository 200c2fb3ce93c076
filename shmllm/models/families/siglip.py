"""SigLIP and SigLIP 2: vectors of texts and of images, as CLIP. Tokens of a text attend to all of
it, and texts have padding (Zhai et al., 2023; Tschannen et al., 2025). Images have one size, or, in
the variant NaFlex of SigLIP 2, any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.formats import siglip2
from shmllm.models.config import ModelConfig
from shmllm.models.config_file import architecture_name
from shmllm.models.families.clip import named_weights, pooled_vision, read_texts
from shmllm.models.fields import Fields
from shmllm.models.head_specs import DenseSpec, HeadSpec
from shmllm.models.mixer_specs import AttentionSpec, MixerSpec
from shmllm.models.vision.fields import read_siglip, read_siglip2, vision_fields
from shmllm.models.vision.siglip2_specs import PooledSiglip2Tower
from shmllm.models.vision.specs import VisionSpec

__all__ = ["configure", "named_weights", "read_vision"]

_ANY_SIZE = "Siglip2Model"

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
    has_any_size = architecture_name(fields) == _ANY_SIZE
    vision = vision_fields(fields, f"siglip{2 if has_any_size else ''}_vision_model")
    if vision is None:
        return None
    if not vision.flag("vision_use_head", True):
        raise vision.error("vision_use_head false is not supported: the head makes the vectors")
    if has_any_size:
        tower = PooledSiglip2Tower(
            **read_siglip2(vision), merge_size=1, most_patches=siglip2.MOST_PATCHES
        )
        found = VisionSpec(image_token=0, tower=tower, merge_size=1)
    else:
        encoder = read_siglip(vision)
        found = pooled_vision(encoder, encoder.hidden_size)
    if found.pooled_width != width:
        raise vision.error(
            f"hidden_size ({found.pooled_width}) must be that of the vectors of texts, "
            f"projection_size ({width})"
        )
    return found
