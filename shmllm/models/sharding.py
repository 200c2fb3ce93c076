"""The part of a model's configuration that one rank of a tensor parallel group computes.

A shard of a model is a model with fewer heads and narrower feed-forwards. What `shard_config`
leaves whole is computed by each rank of the group. This module must not import torch: front ends
import it too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig
from shmllm.models.mixer_specs import (
    AttentionSpec,
    DeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    MambaSpec,
)
from shmllm.models.shard import Shard
from shmllm.models.specs import DenseAndExpertsSpec, LayerSpec, MLPSpec, MoESpec

MOST_RANKS = 64


class _NotDivisible(Exception):
    """Some sizes of a layer have no part for each rank."""


def _divide(count: int, size: int, what: str) -> int:
    if count % size:
        raise _NotDivisible(f"{count:,} {what}")
    return count // size


def _shard_attention(spec: AttentionSpec, size: int) -> AttentionSpec:
    if spec.qk_norm == "row":  # each norm reads all heads
        return spec
    kv_heads = spec.num_kv_heads
    kv_heads = _divide(kv_heads, size, "key-value heads") if size % kv_heads else 1
    return replace(spec, num_heads=_divide(spec.num_heads, size, "heads"), num_kv_heads=kv_heads)


def _shard_latent_attention(spec: LatentAttentionSpec, size: int) -> LatentAttentionSpec:
    return replace(spec, num_heads=_divide(spec.num_heads, size, "heads"))


def _shard_delta_net(spec: DeltaNetSpec, size: int) -> DeltaNetSpec:
    keys = _divide(spec.key_heads, size, "key heads of delta nets")
    return replace(spec, key_heads=keys, value_heads=spec.value_heads // size)


def _shard_mamba2(spec: Mamba2Spec, size: int) -> Mamba2Spec:
    if spec.groups % size:  # the norm of the output reads all heads of a group
        return spec
    return replace(spec, heads=spec.heads // size, groups=spec.groups // size)


def _shard_mlp(spec: MLPSpec, size: int) -> MLPSpec:
    return replace(spec, inner=_divide(spec.inner, size, "columns of an MLP"))


def _shard_experts(spec: MoESpec, size: int) -> MoESpec:
    shared = None if spec.shared is None else _shard_mlp(spec.shared, size)
    inner = _divide(spec.inner, size, "columns of an expert")
    return replace(spec, inner=inner, shared=shared)


def _shard_both(spec: DenseAndExpertsSpec, size: int) -> DenseAndExpertsSpec:
    return replace(spec, mlp=_shard_mlp(spec.mlp, size), experts=_shard_experts(spec.experts, size))


_RULES: dict[type[Any], Callable[[Any, int], Any]] = {
    AttentionSpec: _shard_attention,
    LatentAttentionSpec: _shard_latent_attention,
    DeltaNetSpec: _shard_delta_net,
    Mamba2Spec: _shard_mamba2,
    MambaSpec: lambda spec, size: spec,  # its time steps are products of all channels
    MLPSpec: _shard_mlp,
    MoESpec: _shard_experts,
    DenseAndExpertsSpec: _shard_both,
    type(None): lambda spec, size: spec,
}
"""By the type of a mixer or a feed-forward: (its spec, the number of ranks) -> that of a rank."""


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Returns the configuration of a rank's part of a model.

    Raises:
        EngineStartError: the model cannot be divided by the number of ranks. The message has the
            numbers of ranks that are possible.
    """
    try:
        layers, further = (
            _shard_layers(each, shard.size) for each in (config.layers, config.further_layers)
        )
    except _NotDivisible as problem:
        possible = ", ".join(str(size) for size in _sizes(config))
        raise EngineStartError(
            f"tensor_parallel_size {shard.size} does not divide the {problem} of "
            f"{config.architecture}; possible: {possible}"
        ) from None
    return replace(config, layers=layers, further_layers=further, shard=shard, whole=config)


def _shard_layers(layers: tuple[LayerSpec, ...], size: int) -> tuple[LayerSpec, ...]:
    return tuple(
        replace(
            layer,
            mixer=_RULES[type(layer.mixer)](layer.mixer, size),
            mlp=_RULES[type(layer.mlp)](layer.mlp, size),
        )
        for layer in layers
    )


def _sizes(config: ModelConfig) -> list[int]:
    """Returns the numbers of ranks that a model can be divided by."""
    found = []
    for size in range(1, MOST_RANKS + 1):
        try:
            _shard_layers(config.layers + config.further_layers, size)
        except _NotDivisible:
            continue
        found.append(size)
    return found
