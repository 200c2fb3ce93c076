"""Arcee: Llama with an MLP that has no gate."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.llama import configure as configure_llama
from shmllm.models.fields import Fields
from shmllm.models.readers import read_mlp, read_norm


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults({"hidden_act": "relu2", "max_position_embeddings": 4096})
    model = configure_llama(fields)
    mlp = replace(read_mlp(fields, bias=fields.flag("mlp_bias", False)), gated=False)
    layers = tuple(replace(layer, mlp=mlp) for layer in model.layers)
    return replace(model, layers=layers, norm=read_norm(fields, default=1e-5))
