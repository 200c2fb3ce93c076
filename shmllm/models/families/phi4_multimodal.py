"""The language model of Phi-4 Multimodal: Phi-4-mini with other defaults. Images and sounds, and
the adapters that read them, are not computed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families import phi3
from shmllm.models.fields import Fields
from shmllm.models.weight_names import renamed

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights

_DEFAULTS = {
    "max_position_embeddings": 131_072,
    "original_max_position_embeddings": 4096,
    "num_key_value_heads": 8,
}
_ROPES = ("default", "longrope")
_OF_AUTHORS = "Phi4MMForCausalLM"
_PROJECTIONS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
_BASES = {f".{name}.weight": f".{name}.base_layer.weight" for name in _PROJECTIONS}
"""The names of the authors' files, in which each projection has adapters beside it."""


def configure(fields: Fields) -> ModelConfig:
    model = phi3.configure(fields.with_absent(_DEFAULTS))
    for rope in model.ropes:
        if rope.type not in _ROPES:
            raise fields.error(f"rope type {rope.type!r} is not supported; supported: longrope")
    adapters = tuple(
        f"model.layers.{index}.{name}.lora_"
        for index in range(model.num_layers)
        for name in _PROJECTIONS
    )
    return replace(model, skipped_prefixes=("model.embed_tokens_extend.", *adapters))


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    found = phi3.named_weights(weights, config)
    if config.architecture != _OF_AUTHORS:
        return found
    return {renamed(name, _BASES): views for name, views in found.items()}
