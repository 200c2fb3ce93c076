"""StableLM: LayerNorms, also of each query and key head; a quarter of each head rotates; attention
and MLP may be side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.fields import Fields
from shmllm.models.layer_specs import PRE_NORMS, LayerNorms, LayerSpec
from shmllm.models.readers import (
    read_attention,
    read_mlp,
    read_model,
    read_num_layers,
    read_positions,
)
from shmllm.models.rope_config import RopeConfig
from shmllm.models.specs import NormSpec

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights
    from shmllm.models.matrices import Destination


_OLD_NAMES = {"norm_eps": "layer_norm_eps", "rope_pct": "partial_rotary_factor"}
"""The fields of the first files (StableLMEpochForCausalLM), and what they are now."""


def configure(fields: Fields) -> ModelConfig:
    old = {now: fields.values.get(then) for then, now in _OLD_NAMES.items()}
    fields = fields.with_defaults({name: x for name, x in old.items() if x is not None})
    fields = fields.with_values(fields.values | {"head_dim": None})  # StableLM has no such field
    positions = read_positions(fields, 4096)
    attention = read_attention(fields, num_kv_heads=32, bias=fields.flag("use_qkv_bias", False))
    rope = RopeConfig.from_fields(fields, positions, attention.head_dim, partial=0.25)
    attention = replace(attention, rope=rope)
    if fields.flag("qk_layernorm", False):
        attention = replace(attention, qk_norm="each")
    is_parallel = fields.flag("use_parallel_residual", False)
    layer = LayerSpec(
        mixer=attention,
        mlp=read_mlp(fields),
        norms=LayerNorms(before_mixer="input_layernorm") if is_parallel else PRE_NORMS,
        parallel=is_parallel,
    )
    model = read_model(fields, [layer] * read_num_layers(fields), positions)
    norm = NormSpec(kind="layer", eps=fields.number("layer_norm_eps", 1e-5), bias=True)
    return replace(model, norm=norm)


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations of the norms of heads as files have them: a tensor for each head."""
    found: NamedWeights = {}
    for name, views in weights.items():
        prefix, is_norm, _ = name.partition("_norm.weight")
        if not is_norm or not prefix.endswith((".q", ".k")):
            found[name] = views
            continue
        num_heads = _num_heads(config, is_query=prefix.endswith(".q"))
        for head, row in enumerate(_rows(views, num_heads, config)):
            found[f"{prefix}_layernorm.norms.{head}.weight"] = (row,)
    return found


def _rows(views: tuple[Destination, ...], num_heads: int, config: ModelConfig) -> list[Destination]:
    """Returns the destination of each head's weights, some of which another rank may have."""
    from torch import Tensor

    from shmllm.models.matrices import Elsewhere, matrix_of

    own = matrix_of(views)
    assert isinstance(own, Tensor), "norms are not packed"
    rows: list[Destination] = [Elsewhere(own[0]) for _ in range(num_heads)]
    for row, place in zip(own, config.shard.find(len(own), num_heads), strict=True):
        rows[place] = row
    return rows


def _num_heads(config: ModelConfig, is_query: bool) -> int:
    attention = (config.whole or config).attentions[0]
    return attention.num_heads if is_query else attention.num_kv_heads
