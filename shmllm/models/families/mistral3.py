"""Mistral 3: Pixtral's tower, and the language models of Mistral, Ministral 3 or Mistral 4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families import ministral3, mistral, mistral4
from shmllm.models.fields import Fields
from shmllm.models.vision.fields import (
    MOST_LAYERS,
    check_rotated_heads,
    read_feature_layer,
    read_item_token,
    read_num_heads,
    read_theta,
    read_vision_activation,
    vision_fields,
)
from shmllm.models.vision.specs import (
    VisionSpec,
)
from shmllm.models.vision.squares_specs import (
    PixtralTower,
)

_FAMILIES: dict[str, Callable[[Fields], ModelConfig]] = {
    "mistral": mistral.configure,
    "ministral3": ministral3.configure,
    "mistral4": mistral4.configure,
}


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults({"tie_word_embeddings": True})
    config = _FAMILIES[fields.text("model_type", "mistral")](fields)
    return replace(config, vision=read_vision(fields, config))


def read_vision(fields: Fields, config: ModelConfig) -> VisionSpec | None:
    """Returns what the model computes of images; None: it has no ``vision_config``."""
    tower = read_tower(fields, fields.whole, config.norm.eps)
    if tower is None:
        return None
    token = read_item_token(fields, ("image_token_index", "image_token_id"), 10, config.vocab_size)
    return VisionSpec(image_token=token, tower=tower, merge_size=tower.merge_size)


def read_tower(fields: Fields, whole: Fields, eps: float) -> PixtralTower | None:
    """Returns Pixtral's tower and the projections behind it; None: there is no ``vision_config``.

    Args:
        fields: what `configure` got.
        whole: the fields around ``vision_config``, perhaps with other defaults.
        eps: of the projections' norm.
    """
    vision = vision_fields(fields, "pixtral")
    if vision is None:
        return None
    hidden_size = vision.integer("hidden_size", 1024)
    num_heads = read_num_heads(vision, "num_attention_heads", 16, hidden_size)
    head_dim = hidden_size // num_heads
    check_rotated_heads(vision, head_dim)
    if (found := vision.integer("head_dim", head_dim)) != head_dim:
        raise vision.error(f"head_dim {found} is not supported; supported: {head_dim}")
    num_stored = vision.integer("num_hidden_layers", 24, maximum=MOST_LAYERS)
    return PixtralTower(
        hidden_size=hidden_size,
        num_layers=read_feature_layer(whole, num_stored, -1),
        num_stored=num_stored,
        num_heads=num_heads,
        inner=vision.integer("intermediate_size", 4096),
        patch_size=vision.integer("patch_size", 16),
        merge_size=whole.integer("spatial_merge_size", 2),
        activation=read_vision_activation(vision, "hidden_act", "gelu"),
        theta=read_theta(vision),
        eps=eps,
        projector_activation=read_vision_activation(whole, "projector_hidden_act", "gelu"),
        bias=whole.flag("multimodal_projector_bias", False),
    )
