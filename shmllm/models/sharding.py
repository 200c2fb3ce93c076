"""The part of a model's configuration that one process of a group computes.

A shard of a model is a model with fewer heads and narrower feed-forwards. What `shard_config`
leaves whole is computed by each rank of the group. This module must not import torch: front ends
import it too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

from shmllm.errors import EngineStartError
from shmllm.models.combined_specs import (
    DenseAndExpertsSpec,
    ExpertsByTokensSpec,
    LatentExpertsSpec,
    MLPAndExpertsSpec,
    ShortcutExpertsSpec,
)
from shmllm.models.compressed_specs import CompressedAttentionSpec
from shmllm.models.config import ModelConfig
from shmllm.models.layer_specs import LayerSpec
from shmllm.models.mamba_fields import CHANNEL_MULTIPLE
from shmllm.models.mixer_specs import (
    AttentionSpec,
    LatentAttentionSpec,
    shares_choice,
)
from shmllm.models.recurrent_specs import (
    DeltaNetSpec,
    KimiDeltaSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    ShortConvolutionSpec,
)
from shmllm.models.shard import Shard, Stage
from shmllm.models.specs import MLPSpec, MoESpec
from shmllm.models.widths import reads_embeds

MOST_RANKS = 64
Beside = TypeVar("Beside", bound=MLPAndExpertsSpec)


class _NotDivisible(Exception):
    """Some sizes of a layer have no part for each rank."""


def _divide(count: int, size: int, what: str) -> int:
    if count % size:
        raise _NotDivisible(f"{count:,} {what}")
    return count // size


def _shard_attention(spec: AttentionSpec, size: int) -> AttentionSpec:
    if spec.qk_norm == "row" or spec.output_norm:  # such a norm reads all heads
        return spec
    kv_heads = spec.num_kv_heads
    kv_heads = _divide(kv_heads, size, "key-value heads") if size % kv_heads else 1
    return replace(spec, num_heads=_divide(spec.num_heads, size, "heads"), num_kv_heads=kv_heads)


def _shard_latent_attention(spec: LatentAttentionSpec, size: int) -> LatentAttentionSpec:
    return replace(spec, num_heads=_divide(spec.num_heads, size, "heads"))


def _shard_delta_net(spec: DeltaNetSpec, size: int) -> DeltaNetSpec:
    if spec.tiled and size > 1:  # the value heads of a key head do not follow each other
        raise _NotDivisible("delta nets of a GGUF file")
    keys = _divide(spec.key_heads, size, "key heads of delta nets")
    return replace(spec, key_heads=keys, value_heads=spec.value_heads // size)


def _shard_kimi_delta(spec: KimiDeltaSpec, size: int) -> KimiDeltaSpec:
    return replace(spec, heads=_divide(spec.heads, size, "heads of delta nets"))


def _shard_mamba2(spec: Mamba2Spec, size: int) -> Mamba2Spec:
    if spec.groups % size:  # the norm of the output reads all heads of a group
        return spec
    part = replace(spec, heads=spec.heads // size, groups=spec.groups // size)
    # Kernels compute so many channels at once.
    return spec if part.convolved_width % CHANNEL_MULTIPLE else part


def _shard_short_convolution(spec: ShortConvolutionSpec, size: int) -> ShortConvolutionSpec:
    if spec.width % (CHANNEL_MULTIPLE * size):  # kernels compute so many channels at once
        return spec
    return replace(spec, width=spec.width // size)


def _shard_mlp(spec: MLPSpec, size: int) -> MLPSpec:
    if spec.sparsity or spec.norm is not None:  # a cut or a norm reads all columns
        return spec
    return replace(spec, inner=_divide(spec.inner, size, "columns of an MLP"))


def _shard_experts(spec: MoESpec, size: int) -> MoESpec:
    shared = None if spec.shared is None else _shard_mlp(spec.shared, size)
    inner = _divide(spec.inner, size, "columns of an expert")
    return replace(spec, inner=inner, shared=shared)


def _shard_both(spec: Beside, size: int) -> Beside:
    return replace(spec, mlp=_shard_mlp(spec.mlp, size), experts=_shard_experts(spec.experts, size))


def _shard_latent_experts(spec: LatentExpertsSpec, size: int) -> LatentExpertsSpec:
    shared = _shard_mlp(spec.shared, size)  # both projections of latents stay whole
    return replace(spec, experts=_shard_experts(spec.experts, size), shared=shared)


def _shard_by_tokens(spec: ExpertsByTokensSpec, size: int) -> ExpertsByTokensSpec:
    first, second = (_shard_experts(each, size) for each in spec.mixtures)
    return replace(spec, first=first, second=second)


_RULES: dict[type[Any], Callable[[Any, int], Any]] = {
    AttentionSpec: _shard_attention,
    LatentAttentionSpec: _shard_latent_attention,
    CompressedAttentionSpec: lambda spec, size: spec,  # its cache is small, and all heads share it
    DeltaNetSpec: _shard_delta_net,
    KimiDeltaSpec: _shard_kimi_delta,
    LightningSpec: lambda spec, size: spec,  # the norm of the output reads all heads
    Mamba2Spec: _shard_mamba2,
    MambaSpec: lambda spec, size: spec,  # its time steps are products of all channels
    ShortConvolutionSpec: _shard_short_convolution,
    MLPSpec: _shard_mlp,
    MoESpec: _shard_experts,
    DenseAndExpertsSpec: _shard_both,
    LatentExpertsSpec: _shard_latent_experts,
    ShortcutExpertsSpec: _shard_both,
    ExpertsByTokensSpec: _shard_by_tokens,
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
    return tuple(_shard_layer(layer, size) for layer in layers)


def _shard_layer(layer: LayerSpec, size: int) -> LayerSpec:
    if layer.branch is not None:  # adapters add to the outputs of whole products
        return layer
    changed = layer.with_mixers(lambda mixer: _RULES[type(mixer)](mixer, size))
    return replace(changed, mlp=_RULES[type(layer.mlp)](layer.mlp, size))


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


def stage_config(config: ModelConfig, index: int, count: int) -> ModelConfig:
    """Returns the configuration of a stage's part of a model.

    The stages get consecutive layers, so that they cost about the same; half of the LM head counts
    for the last one. A layer that adds a shortcut is in the stage of the one before it.

    Args:
        config: the configuration of the model.
        index: the number of the stage, from 0.
        count: the number of stages.

    Raises:
        EngineStartError: the model cannot be divided so.
    """
    told = f"pipeline_parallel_size {count} is not possible for {config.architecture}"
    firsts = [index for index, each in enumerate(config.layers) if not each.adds_shortcut]
    if count > (most := len(firsts)):
        raise EngineStartError(f"{told}: it has {most} layers; possible: 1 to {most}")
    if config.per_layer is not None:
        raise EngineStartError(f"{told}: each of its layers reads the tokens; leave it out")
    if config.embedding_size is not None or config.weights_of or reads_embeds(config):
        raise EngineStartError(f"{told}: its layers share weights or embeddings; leave it out")
    starts = [*firsts, config.num_layers]
    costs = [
        sum(_cost(config, layer) for layer in config.layers[begin:end])
        for begin, end in pairwise(starts)
    ]
    bounds = [starts[bound] for bound in _stage_bounds(costs, _head(config), count)]
    layers = range(bounds[index], bounds[index + 1])
    for layer, source in config.kv_sources.items():
        if any(source < bound <= layer for bound in bounds):
            raise EngineStartError(
                f"{told}: layer {layer} reads the keys and values of layer {source}, which another "
                "stage would have; leave it out"
            )
    for bound in bounds[1:-1]:
        if any(shares_choice(mixer) for mixer in config.layers[bound].mixers):
            raise EngineStartError(
                f"{told}: layer {bound} attends to the tokens that a layer before it has chosen, "
                "which another stage would have; leave it out"
            )
    return replace(config, stage=Stage(index, layers, index == count - 1))


def _cost(config: ModelConfig, layer: LayerSpec) -> int:
    """Returns about the number of elements that a token is multiplied by in a layer."""
    hidden = config.hidden_size
    cost = sum(sum(mixer.linear_widths) + mixer.width for mixer in layer.mixers) * hidden
    if layer.mlp is not None:
        cost += sum(mlp.num_elements(hidden) for mlp in layer.mlp.dense)
        cost += sum(each.top_k * each.expert_elements(hidden) for each in layer.mlp.mixtures)
    return cost


def _head(config: ModelConfig) -> int:
    """Returns the cost of the LM head, as `_cost`: half of its elements. It computes sampled tokens
    only, so none of a prompt but the last one, and it is one large product."""
    return config.vocab_size * config.hidden_size // 2


def _stage_bounds(costs: list[int], head: int, count: int) -> list[int]:
    """Returns the first layer of each stage, and the end: those that make the most expensive stage
    cheapest, each with at least one layer."""
    least = max(max(costs), -(-(sum(costs) + head) // count))
    for limit in range(least, sum(costs) + head + 1, max(least // 256, 1)):
        bounds = _bounds_within(costs, head, count, limit)
        if bounds is not None:
            return bounds
    return [*range(count), len(costs)]


def _bounds_within(costs: list[int], head: int, count: int, limit: int) -> list[int] | None:
    """Returns bounds of stages none of which costs more than the limit, if there are some."""
    bounds, total = [0], 0
    for layer, cost in enumerate(costs):
        left = count - len(bounds)
        is_full = total + cost > limit or len(costs) - layer == left
        if layer > bounds[-1] and left and is_full:
            bounds.append(layer)
            total = 0
        total += cost
    fits = len(bounds) == count and total + head <= limit
    return [*bounds, len(costs)] if fits else None
