"""The different widths of what the operations of a model read and write: the sizes of a step's
buffers. Each is in ascending order. This module must not import torch."""

from __future__ import annotations

from collections.abc import Iterable

from shmllm.models.bias_specs import RelationBiases
from shmllm.models.config import ModelConfig
from shmllm.models.indexer_specs import Chosen
from shmllm.models.recurrent_specs import KimiDeltaSpec


def _ordered(widths: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(widths)))


def mixed_widths(config: ModelConfig) -> tuple[int, ...]:
    """Returns the widths of what the output projections of mixers read."""
    return _ordered(mixer.width for mixer in config.mixers)


def inner_widths(config: ModelConfig) -> tuple[int, ...]:
    """Returns the widths of the outputs of the MLPs' activations."""
    return _ordered(mlp.inner for mlp in config.dense_mlps)


def _latent_widths(config: ModelConfig) -> set[int]:
    return {each.latent for each in config.mixtures if each.latent is not None}


def _laurel_ranks(config: ModelConfig) -> set[int]:
    ranks = (layer.laurel_rank for layer in config.layers)
    return {rank for rank in ranks if rank is not None}


def reads_embeds(config: ModelConfig) -> bool:
    """Returns whether layers read the tokens' embeddings beside the residual stream."""
    return any(layer.branch is not None for layer in config.layers)


def sets_aside(config: ModelConfig) -> bool:
    """Returns whether layers read something beside the residual stream that was set aside."""
    return reads_embeds(config) or any(layer.adds_shortcut for layer in config.layers)


def _adapted_widths(config: ModelConfig) -> set[int]:
    """Returns the widths of the outputs of projections that have adapters."""
    widths: set[int] = set()
    for layer in config.layers:
        if layer.branch is not None:
            widths.update(mlp.inner for mlp in layer.dense)
        if layer.branch is not None and layer.branch.adapts_attention and layer.attention:
            spec = layer.attention
            widths |= {spec.query_width, spec.key_width, spec.value_width}
    return widths


def low_ranks(config: ModelConfig) -> tuple[int, ...]:
    """Returns the widths between two products that are one operation: of decays by channel and of
    their gates, of adapters, and of the MLP of a branch and its projection."""
    nets = (each for each in config.mixers if isinstance(each, KimiDeltaSpec))
    widths = {net.head_dim for net in nets if net.has_low_rank}
    branches = [layer.branch for layer in config.layers if layer.branch is not None]
    widths |= {branch.adapter_rank for branch in branches}
    return _ordered(widths | ({config.hidden_size} if branches else set()))


def joined_widths(config: ModelConfig) -> tuple[int, ...]:
    """Returns the widths of rows that two others, equally wide, are side by side in."""
    reads_both = config.num_further or config.drafting is not None
    widths = {2 * config.hidden_size} if reads_both or reads_embeds(config) else set()
    widths |= {each.joined_rank for each in config.latent_attentions if each.joined_rank}
    return _ordered(widths)


def read_widths(config: ModelConfig) -> tuple[int, ...]:
    """Returns the widths of what matrix products read."""
    widths = {config.hidden_size, *mixed_widths(config), *inner_widths(config)}
    widths.update(low_ranks(config))
    widths.update(*(attention.read_widths for attention in config.latent_attentions))
    widths.update(*(attention.read_widths for attention in config.compressed_attentions))
    widths |= set() if config.per_layer is None else {config.per_layer.width}
    widths.update(joined_widths(config))
    widths |= {each.input_width for each in config.attentions if each.input_width is not None}
    if (drafting := config.drafting) is not None:
        widths.add(drafting.num_levels * drafting.source_width)
    widths |= _laurel_ranks(config) | _latent_widths(config) | {config.embedding_width}
    return _ordered(widths)


def linear_widths(config: ModelConfig) -> tuple[int, ...]:
    """Returns the widths of the outputs of the layers' projections."""
    widths = {config.hidden_size}.union(*(mixer.linear_widths for mixer in config.mixers))
    widths |= {mlp.up_width for mlp in config.dense_mlps} | _adapted_widths(config)
    widths |= set() if config.per_layer is None else {config.per_layer.width}
    widths |= set() if config.altup is None else {config.altup.num_streams}
    widths |= _laurel_ranks(config) | _latent_widths(config)
    return _ordered(widths)


def chosen_of(config: ModelConfig) -> Chosen | None:
    """Returns how much the indexers of the layers, which are alike, choose for each token; None:
    there are none."""
    every = [each.chosen for each in config.attentions]
    every += [each.chosen for each in config.latent_attentions]
    return next((chosen for chosen in every if chosen), None)


def query_ranks(config: ModelConfig) -> tuple[int, ...]:
    """Returns the widths of what queries are projections of, and which have norms."""
    ranks = [each.query_rank for each in config.latent_attentions]
    ranks += [each.query_rank for each in config.compressed_attentions]
    return _ordered(rank for rank in ranks if rank is not None)


def num_listed(config: ModelConfig) -> int:
    """Returns the largest number of keys and entries that a token attends to; 0: none are listed
    for it."""
    return max((each.most_listed for each in config.compressed_attentions), default=0)


def relations_of(config: ModelConfig) -> RelationBiases | None:
    """Returns what the layers, which are alike, add to scores by query, key and distance; None:
    nothing."""
    every = (each.biases for each in config.attentions)
    return next((biases for biases in every if isinstance(biases, RelationBiases)), None)


def num_relations(config: ModelConfig) -> int:
    """Returns how many distances have embeddings of their own."""
    relations = relations_of(config)
    return 0 if relations is None else relations.num_rows
