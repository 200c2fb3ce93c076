"""Qwen 3 Next: as Qwen 3.5 with experts. Its checkpoints have a delta net's input projections in
two tensors, ordered by key heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from shmllm.models.config import ModelConfig
from shmllm.models.families.qwen2_moe import read_experts_and_shared, with_dense_mlps
from shmllm.models.families.qwen3_5 import configure_with
from shmllm.models.fields import Fields
from shmllm.models.recurrent_specs import DeltaNetSpec

if TYPE_CHECKING:
    from shmllm.models.layers import NamedWeights
    from shmllm.models.matrices import Matrix


def configure(fields: Fields) -> ModelConfig:
    experts = read_experts_and_shared(
        fields,
        inner=512,
        shared_inner=512,
        num_experts=512,
        top_k=10,
        renormalize=fields.flag("norm_topk_prob", True),
    )
    model = configure_with(fields, experts)
    return replace(model, layers=with_dense_mlps(fields, model.layers))


_FUSED = ("qkvz", ("qkv", "z")), ("ba", ("b", "a"))
"""The projections that a checkpoint has in one tensor, and what they are of."""


def named_weights(weights: NamedWeights, config: ModelConfig) -> NamedWeights:
    """Returns the destinations of the input projections under this family's names."""
    from shmllm.models.matrices import joined, matrix_of

    for index, layer in enumerate(config.layers):
        net = layer.mixer
        if isinstance(net, DeltaNetSpec):
            prefix = f"model.layers.{index}.linear_attn.in_proj_"
            for name, parts in _FUSED[net.apart :]:
                views = [matrix_of(weights.pop(f"{prefix}{part}.weight")) for part in parts]
                order = _by_key_head(net, views) if name == "qkvz" else _alternating(net, views)
                weights[f"{prefix}{name}.weight"] = (joined([*order]),)
    return weights


def _by_key_head(net: DeltaNetSpec, views: list[Matrix]) -> Iterator[Matrix]:
    """Yields the rows of each key head: its query, its key, the values and the gates of its value
    heads."""
    keys, values = net.key_heads * net.key_dim, net.width // net.key_heads
    parts = (*views[0].split_with_sizes([keys, keys, net.width]), views[1])
    sizes = net.key_dim, net.key_dim, values, values
    split = (
        part.split_with_sizes([size] * net.key_heads)
        for part, size in zip(parts, sizes, strict=True)
    )
    for of_head in zip(*split, strict=True):
        yield from of_head


def _alternating(net: DeltaNetSpec, views: list[Matrix]) -> Iterator[Matrix]:
    """Yields the rates and the decays of each key head's value heads."""
    sizes = [net.value_heads // net.key_heads] * net.key_heads
    for of_head in zip(*(view.split_with_sizes(sizes) for view in views), strict=True):
        yield from of_head
