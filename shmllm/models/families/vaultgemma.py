"""VaultGemma: Gemma 2 without norms behind attention and MLP."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.gemma2 import configure as configure_gemma2
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerNorms

_NORMS = LayerNorms(before_mixer="input_layernorm", before_mlp="pre_feedforward_layernorm")


def configure(fields: Fields) -> ModelConfig:
    model = configure_gemma2(fields)
    layers = tuple(replace(layer, norms=_NORMS) for layer in model.layers)
    return replace(model, layers=layers)
