"""StableLM: LayerNorms; a quarter of each head rotates; attention and MLP may be side by side."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.readers import (
    read_attention,
    read_mlp,
    read_model,
    read_num_layers,
    read_positions,
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import PRE_NORMS, LayerNorms, LayerSpec, NormSpec


def configure(fields: Fields) -> ModelConfig:
    if fields.flag("qk_layernorm", False):
        raise fields.error("qk_layernorm true is not supported")
    fields = fields.with_values(fields.values | {"head_dim": None})  # StableLM has no such field
    positions = read_positions(fields, 4096)
    attention = read_attention(fields, num_kv_heads=32, bias=fields.flag("use_qkv_bias", False))
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, partial=0.25)
    is_parallel = fields.flag("use_parallel_residual", False)
    layer = LayerSpec(
        mixer=replace(attention, rope=rope),
        mlp=read_mlp(fields),
        norms=LayerNorms(before_mixer="input_layernorm") if is_parallel else PRE_NORMS,
        parallel=is_parallel,
    )
    model = read_model(fields, [layer] * read_num_layers(fields), positions)
    norm = NormSpec(kind="layer", eps=fields.number("layer_norm_eps", 1e-5), bias=True)
    return replace(model, norm=norm)
