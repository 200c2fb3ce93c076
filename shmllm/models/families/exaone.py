"""EXAONE 3, 3.5 and Deep: Llama under other names of fields and weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.llama import configure as configure_llama
from shmllm.models.fields import Fields
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_FIELDS = {
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
"""The names that files of the models' authors have for fields."""
_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}
_NAMES = {
    "model.layers.": "transformer.h.",
    "model.embed_tokens.": "transformer.wte.",
    "model.norm.": "transformer.ln_f.",
    ".self_attn.o_proj.": ".self_attn.out_proj.",
    ".self_attn.": ".attn.attention.",
    ".input_layernorm.": ".ln_1.",
    ".post_attention_layernorm.": ".ln_2.",
    ".mlp.gate_proj.": ".mlp.c_fc_0.",
    ".mlp.up_proj.": ".mlp.c_fc_1.",
    ".mlp.down_proj.": ".mlp.c_proj.",
}


def configure(fields: Fields) -> ModelConfig:
    own = {name: fields.values[own] for name, own in _FIELDS.items() if own in fields.values}
    return configure_llama(fields.with_absent(_DEFAULTS | own))


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    return {renamed(name, _NAMES): views for name, views in weights.items()}


def other_names(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations of the names that transformers' modules have: Llama's."""
    defaults = {own: name for name, own in reversed(_NAMES.items())}
    return {renamed(name, defaults): views for name, views in weights.items()}
