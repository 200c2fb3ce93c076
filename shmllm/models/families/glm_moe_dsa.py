"""GLM-5: DeepSeek-V3.2's attention, of which some layers read what a layer before them has chosen;
DeepSeek-V3's experts."""

from __future__ import annotations

from dataclasses import replace

from shmllm.models.config import ModelConfig
from shmllm.models.families.deepseek_v3 import (
    check_choice,
    read_latent_attention,
    read_sigmoid_experts,
    with_further_layers,
)
from shmllm.models.families.deepseek_v32 import with_indexer, with_mlps
from shmllm.models.fields import Fields
from shmllm.models.mixer_specs import LatentAttentionSpec
from shmllm.models.readers import (
    read_layer_types,
    read_model,
    read_norm,
    read_num_layers,
    read_positions,
)

FULL, SHARED = "full", "shared"
_LETTERS = {"F": FULL, "S": SHARED}


def configure(fields: Fields) -> ModelConfig:
    fields = fields.null_as_false("norm_topk_prob")
    for name in ("rope_interleave", "indexer_rope_interleave"):
        check_choice(fields, name, True)
    positions = read_positions(fields, 202_752)
    attention = read_latent_attention(
        fields, positions, interleaved=True, query_rank=2048, nope_dim=192, value_dim=256
    )
    attention = with_indexer(fields, positions, attention, num_heads=32, interleaved=True)
    experts = read_sigmoid_experts(fields, inner=2048, num_experts=256, weight_scale=2.5)
    layers = with_mlps(fields, with_shared_choices(fields, attention), experts)
    model = with_further_layers(read_model(fields, layers, positions), fields, experts)
    further = tuple(replace(layer, mixer=attention) for layer in model.further_layers)
    return replace(model, norm=read_norm(fields, default=1e-5), further_layers=further)


def with_shared_choices(
    fields: Fields, attention: LatentAttentionSpec, every: int = 1
) -> list[LatentAttentionSpec]:
    """Returns the attention of each layer: one with an indexer, or with the choice of the layer
    before it.

    Args:
        fields: the fields of config.json.
        attention: the attention, with its indexer.
        every: the default of ``index_topk_freq``.
    """
    assert attention.indexer is not None, "it was added"
    shared = replace(attention, indexer=replace(attention.indexer, is_shared=True))
    mixers = {FULL: attention, SHARED: shared}
    types = _indexer_types(fields, read_num_layers(fields), every)
    return [mixers[kind] for kind in types]


def _indexer_types(fields: Fields, num_layers: int, every: int) -> tuple[str, ...]:
    """Returns FULL, or SHARED for a layer that has the choice of the one before it."""
    pattern = fields.values.get("index_topk_pattern")
    if isinstance(pattern, str):
        pattern = [_LETTERS.get(letter, letter) for letter in pattern]
    if fields.values.get("indexer_types") is None and pattern is not None:
        fields = fields.with_values(fields.values | {"indexer_types": pattern})
    types = read_layer_types(fields, num_layers, (FULL, SHARED), "indexer_types")
    if types is None:
        every = fields.integer("index_topk_freq", every)
        first = fields.integer("index_skip_topk_offset", 2, minimum=0)
        types = tuple(
            FULL if max(index - first + 1, 0) % every == 0 else SHARED
            for index in range(num_layers)
        )
    if types[0] != FULL:
        raise fields.error("'indexer_types' begins with a layer that has no choice to share")
    return types
