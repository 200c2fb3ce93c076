"""MiniCPM 3: latent attention and dense MLPs; factors of embeddings, residual additions and logits
that follow from the numbers of layers and of columns (Hu et al., "MiniCPM", 2024, section 3)."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.deepseek_v3 import read_latent_attention
from shmllm.models.fields import Fields
from shmllm.models.readers import (
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
)
from shmllm.models.specs import LayerSpec

_DEFAULTS = {"kv_lora_rank": 256, "qk_rope_head_dim": 32}


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
    num_layers = read_num_layers(fields)
    factors = fields.with_absent({"scale_depth": 1.4, "dim_model_base": 256})
    depth, base = (factors.optional_number(name) for name in ("scale_depth", "dim_model_base"))
    layers = [LayerSpec(mixer=attention, mlp=mlp)] * num_layers
    return replace(
        read_model(fields, layers, positions, tied=True),
        norm=read_norm(fields, default=1e-5),
        embedding_scale=fields.number("scale_emb", 12.0),
        residual_scale=1.0 if depth is None else depth / num_layers**0.5,
        logits_scale=1.0 if base is None else base / hidden,
    )
