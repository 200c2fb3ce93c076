"""DeepSeek-V3.2: DeepSeek-V3 whose attention reads the tokens that an indexer chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import (
    read_latent_attention,
    read_sigmoid_experts,
    with_further_layers,
)
from shmllm.models.fields import Fields
from shmllm.models.indexer_specs import IndexerSpec
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mixer_specs import LatentAttentionSpec, MixerSpec
from shmllm.models.readers import (
    DENSE,
    SPARSE,
    read_mlp,
    read_mlp_types,
    read_model,
    read_num_layers,
    read_positions,
)
from shmllm.models.specs import MoESpec


def configure(fields: Fields) -> ModelConfig:
    fields = fields.null_as_false("norm_topk_prob")
    positions = read_positions(fields, 163_840)
    attention = with_indexer(
        fields, positions, read_latent_attention(fields, positions, interleaved=True), num_heads=64
    )
    experts = read_sigmoid_experts(
        fields, inner=2048, num_experts=256, num_groups=8, top_groups=4, weight_scale=2.5
    )
    layers = with_mlps(fields, [attention] * read_num_layers(fields), experts)
    return with_further_layers(read_model(fields, layers, positions), fields, experts)


def with_mlps(
    fields: Fields, mixers: Sequence[MixerSpec], experts: MoESpec, *, num_dense: int = 3
) -> list[LayerSpec]:
    """Returns layers with an MLP or experts, as ``mlp_layer_types`` or ``first_k_dense_replace``
    (by default `num_dense`) says."""
    num_dense = fields.integer("first_k_dense_replace", num_dense, minimum=0)
    types = read_mlp_types(fields, len(mixers))
    if types is None:
        types = tuple(DENSE if index < num_dense else SPARSE for index in range(len(mixers)))
    bias = fields.flag("mlp_bias", False)
    return [
        LayerSpec(mixer=mixer, mlp=experts if kind == SPARSE else read_mlp(fields, bias=bias))
        for mixer, kind in zip(mixers, types, strict=True)
    ]


def with_indexer(
    fields: Fields,
    positions: int,
    attention: LatentAttentionSpec,
    *,
    num_heads: int,
    interleaved: bool = False,
) -> LatentAttentionSpec:
    """Returns a latent attention that reads what an indexer chooses.

    Args:
        fields: the fields of config.json.
        positions: the result of `read_positions`; no more tokens are chosen, as there are no more.
        attention: the attention.
        num_heads: the default of ``index_n_heads``.
        interleaved: see `IndexerSpec`.
    """
    if attention.query_rank is None:
        raise fields.error("q_lora_rank is null, and an indexer's queries are a projection of it")
    head_dim = fields.integer("index_head_dim", 128)
    if head_dim < attention.rope_dim:
        raise fields.error(
            f"index_head_dim ({head_dim}) is less than qk_rope_head_dim ({attention.rope_dim})"
        )
    indexer = IndexerSpec(
        num_heads=fields.integer("index_n_heads", num_heads),
        head_dim=head_dim,
        top_k=min(fields.integer("index_topk", 2048), positions),
        interleaved=interleaved,
    )
    return replace(attention, indexer=indexer)
