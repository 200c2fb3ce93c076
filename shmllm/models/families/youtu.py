"""Youtu-LLM: latent attention and dense MLPs."""

from __future__ import annotations

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import read_latent_attention
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import read_mlp, read_model, read_num_layers, read_positions


def configure(fields: Fields) -> ModelConfig:
    fields = fields.null_as_false("rope_interleave")
    positions = read_positions(fields, 131_072)
    attention = read_latent_attention(
        fields, positions, interleaved=fields.flag("rope_interleave", True)
    )
    layer = LayerSpec(mixer=attention, mlp=read_mlp(fields))
    return read_model(fields, [layer] * read_num_layers(fields), positions, tied=True)
