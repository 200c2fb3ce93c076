"""LLaVA: CLIP, SigLIP or Pixtral's tower, two projections, and another family's language model."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

from shmllm.models.config import ModelConfig
from shmllm.models.families import mistral3
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import (
    read_clip,
    read_feature_layer,
    read_item_token,
    read_siglip,
    read_vision_activation,
    vision_fields,
)
from shmllm.models.vision.llava_specs import LlavaTower
from shmllm.models.vision.specs import VisionSpec

_TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 32000, "intermediate_size": 11008},
    "internlm2": {"vocab_size": 103168, "intermediate_size": 11008},
    "mistral": {"vocab_size": 32000, "intermediate_size": 14336},
    "qwen2": {"vocab_size": 151936, "intermediate_size": 22016},
    "qwen3": {"vocab_size": 151936, "intermediate_size": 22016},
    "qwen3_moe": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
    },
}
"""What files leave out of ``text_config``, by its ``model_type``, which is a family's name."""
_SIZES = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_CLIP, _SIGLIP = "clip_vision_model", "siglip_vision_model"


class Defaults(NamedTuple):
    """What fields of config.json mean where they are absent.

    Attributes:
        towers: the values of ``vision_config.model_type``, the default first.
        strategy: ``vision_feature_select_strategy``.
        layer: ``vision_feature_layer``.
        image_token: ``image_token_index``.
    """

    towers: tuple[str, ...] = (_CLIP, _SIGLIP)
    strategy: str = "default"
    layer: int = -2
    image_token: int = 32000


DEFAULTS = Defaults()


def configure(fields: Fields) -> ModelConfig:
    config = read_text_model(fields)
    kind = fields.whole.table("vision_config").get("model_type")
    read = _read_pixtral if kind == "pixtral" else read_vision
    return replace(config, vision=read(fields, config.vocab_size))


def read_text_model(fields: Fields, default: str = "llama") -> ModelConfig:
    """Returns the configuration of the language model.

    Args:
        fields: what `configure` got.
        default: its ``model_type`` where that is absent.
    """
    text = fields.text("model_type", default)
    if text not in _TEXT_DEFAULTS:  # config.json has no text_config
        raise fields.error(f"model_type {text!r} is not supported; it needs a text_config")
    family: Any = import_module(f"shmllm.models.families.{text}")
    defaults = _SIZES | _TEXT_DEFAULTS[text]
    config: ModelConfig = family.configure(fields.with_defaults(defaults))
    return config


def _read_pixtral(fields: Fields, vocab_size: int) -> VisionSpec:
    """Returns what the model computes of images by Pixtral's tower, whose patches are of no squares
    and have no token before them."""
    whole, names = fields.whole, ("image_token_index", "image_token_id")
    strategy = whole.text("vision_feature_select_strategy", DEFAULTS.strategy)
    if strategy != "full":
        raise whole.error(
            f"vision_feature_select_strategy {strategy!r} is not supported with Pixtral's tower; "
            "supported: full"
        )
    given = {"vision_feature_layer": DEFAULTS.layer, "multimodal_projector_bias": True}
    given |= {"spatial_merge_size": 1}
    tower = mistral3.read_tower(fields, whole.with_defaults(given), 0.0)
    assert tower is not None, "there is a vision_config"
    if tower.merge_size != 1:
        raise whole.error(f"spatial_merge_size {tower.merge_size} is not supported; supported: 1")
    return VisionSpec(
        image_token=read_item_token(fields, names, DEFAULTS.image_token, vocab_size),
        tower=replace(tower, merges=False),
        merge_size=1,
    )


def read_vision(
    fields: Fields, vocab_size: int, defaults: Defaults = DEFAULTS
) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    vision = vision_fields(fields, *defaults.towers)
    if vision is None:
        return None
    whole = fields.whole
    kind = vision.text("model_type", defaults.towers[0])
    encoder = read_siglip(vision) if kind == _SIGLIP else read_clip(vision)
    strategy = whole.text("vision_feature_select_strategy", defaults.strategy)
    if strategy not in ("default", "full"):
        raise whole.error(
            f"vision_feature_select_strategy {strategy!r} is not supported; supported: "
            "default, full"
        )
    drops_first = strategy == "default"
    num_layers = read_feature_layer(whole, encoder.num_layers, defaults.layer)
    tower = LlavaTower(
        encoder=replace(encoder, num_layers=num_layers, final_norm=False),
        num_stored=encoder.num_layers,
        drops_first=drops_first,
        activation=read_vision_activation(whole, "projector_hidden_act", "gelu"),
        bias=whole.flag("multimodal_projector_bias", True),
    )
    return VisionSpec(
        image_token=read_item_token(
            fields, ("image_token_index", "image_token_id"), defaults.image_token, vocab_size
        ),
        tower=tower,
        tile_embeddings=encoder.side**2 + (encoder.kind == "clip") - drops_first,
    )
