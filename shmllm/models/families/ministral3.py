"""Ministral 3: Mistral whose queries grow with their position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shmllm.models.config import ModelConfig
from shmllm.models.families.mistral import configure as configure_mistral
from shmllm.models.fields import Fields
from shmllm.models.mixer_specs import AttentionSpec, Growth

_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_DEFAULTS = {
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "head_dim": 128,
    "sliding_window": None,
}


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_absent(_DEFAULTS)
    if not fields.table("rope_scaling"):
        fields = fields.with_defaults({"rope_parameters": _ROPE})
    model, growth = configure_mistral(fields), read_growth(fields)
    layers = []
    for layer in model.layers:
        assert isinstance(layer.mixer, AttentionSpec), "Mistral has nothing else"
        layers.append(replace(layer, mixer=replace(layer.mixer, growth=growth)))
    return replace(model, layers=tuple(layers))


def read_growth(fields: Fields) -> Growth | None:
    """Returns `AttentionSpec.growth` of ``llama_4_scaling_beta``, a field of the rotation."""
    name = "rope_scaling" if fields.table("rope_scaling") else "rope_parameters"
    rope = Fields(fields.table(name), f"{fields.where}: {name}")
    rate = rope.optional_number("llama_4_scaling_beta")
    return None if rate is None else Growth(rate, rope.integer("original_max_position_embeddings"))
