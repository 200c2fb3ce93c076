"""PaliGemma 1 and 2: SigLIP, a projection, and Gemma 1 or 2, whose prompts attend to all of
themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families import gemma, gemma2
from shmllm.models.fields import Fields
from shmllm.models.mixer_specs import WITHIN_ITEMS, AttentionSpec, MixerSpec
from shmllm.models.vision.fields import read_item_token, read_siglip, vision_fields
from shmllm.models.vision.projected_specs import PaliGemmaTower
from shmllm.models.vision.specs import VisionSpec

_TEXT_MODELS = {"gemma": gemma, "gemma2": gemma2}
_DEFAULTS = {
    "hidden_size": 2048,
    "num_hidden_layers": 18,
    "intermediate_size": 16384,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "vocab_size": 257_152,
}
"""The language model of files without ``text_config``."""
_BOTH_WAYS = "use_bidirectional_attention"


def configure(fields: Fields) -> ModelConfig:
    if fields.whole is fields:
        fields = fields.with_defaults(_DEFAULTS)
    kind = fields.text("model_type", "gemma")
    family: Any = _TEXT_MODELS.get("gemma" if kind == "paligemma" else kind)
    if family is None:
        raise fields.error(f"model_type {kind!r} is not supported; supported: gemma, gemma2")
    if not fields.flag(_BOTH_WAYS, True):
        raise fields.error(f"{_BOTH_WAYS} false is not supported: prompts attend both ways")
    config: ModelConfig = family.configure(fields.with_values(fields.values | {_BOTH_WAYS: None}))
    windows = [each.window for each in config.attentions if isinstance(each.window, int)]
    # The tokens of a prompt attend to all of it, also where it is longer than a window.
    positions = min([config.max_position_embeddings, *windows])
    config = config.with_mixers(_within_prompts)
    return replace(
        config,
        max_position_embeddings=positions,
        spans_prompts=True,
        vision=read_vision(fields, config.vocab_size),
    )


def _within_prompts(mixer: MixerSpec) -> MixerSpec:
    assert isinstance(mixer, AttentionSpec), "both families have attention alone"
    return replace(mixer, ahead=WITHIN_ITEMS, window=None)


def read_vision(fields: Fields, vocab_size: int) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision = vision_fields(fields, "siglip_vision_model")
    if vision is None:
        return None
    encoder = read_siglip(vision)
    names = "image_token_index", "image_token_id"
    return VisionSpec(
        image_token=read_item_token(fields, names, 256_000, vocab_size),
        tower=PaliGemmaTower(encoder=encoder),
        tile_embeddings=encoder.side**2,
    )
