"""MiniCPM 3: latent attention and dense MLPs, and the factors of MiniCPM."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import read_latent_attention
from shmllm.models.families.minicpm import with_factors
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.readers import (
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
)

_DEFAULTS = {"kv_lora_rank": 256, "qk_rope_head_dim": 32, "scale_emb": 12.0}
_FACTORS = {"scale_depth": 1.4, "dim_model_base": 256}


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(_DEFAULTS)
    positions, hidden = read_positions(fields, 32_768), fields.integer("hidden_size")
    attention = read_latent_attention(
        fields,
        positions,
        interleaved=False,
        query_rank=768,
        nope_dim=64,
        value_dim=hidden // fields.integer("num_attention_heads"),
    )
    mlp = read_mlp(fields, bias=fields.flag("mlp_bias", False))
    layers = [LayerSpec(mixer=attention, mlp=mlp)] * read_num_layers(fields)
    model = read_model(fields, layers, positions, tied=True)
    return with_factors(
        fields.with_absent(_FACTORS), replace(model, norm=read_norm(fields, default=1e-5))
    )
