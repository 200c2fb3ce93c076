"""The buffers for a step's activations and logits on the device, at fixed addresses."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from shmllm.models.compressed_specs import CompressedAttentionSpec
from shmllm.models.config import ModelConfig, RopeConfig
from shmllm.models.entries import entry_ropes
from shmllm.models.indexer_specs import Chosen
from shmllm.models.layers import Allocator
from shmllm.models.mixer_specs import AttentionSpec, MixerSpec
from shmllm.models.recurrent_specs import DeltaNetSpec, Mamba2Spec, MambaSpec
from shmllm.models.widths import (
    chosen_of,
    inner_widths,
    joined_widths,
    linear_widths,
    low_ranks,
    query_ranks,
    sets_aside,
)
from shmllm.worker.arena import CountingAllocator
from shmllm.worker.gpu.attention_launches import AttentionLaunches, HeadShape
from shmllm.worker.gpu.connections import ConnectionOps
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.experts import ExpertBuffers
from shmllm.worker.gpu.many_products import ManyProducts
from shmllm.worker.gpu.relations import RelationBuffers
from shmllm.worker.routed_experts import allocate_routed
from shmllm_kernels.gpu import few_mamba_inputs
from shmllm_kernels.gpu.attention import AttentionScratch
from shmllm_kernels.gpu.few_rows import MAX_ROWS
from shmllm_kernels.gpu.indexer import TOKENS_AT_ONCE


@dataclass(frozen=True, slots=True)
class Choice:
    """The tokens, or the blocks of keys, that each token of a step attends to, as those of a
    request; or what `list_keys` lists.

    Attributes:
        table: [max_tokens, choices, entries] int32, slots, blocks or places of the cache.
        starts: [max_tokens + 1] int32, the first token of each of these requests.
        lens: [max_tokens] int32, how many tokens they are.
        scores: [rows, choices, blocks] float32, scratch memory, of single tokens or of blocks.
    """

    table: Tensor
    starts: Tensor
    lens: Tensor
    scores: Tensor

    @classmethod
    def allocate(
        cls,
        allocate: Allocator,
        max_tokens: int,
        chosen: Chosen,
        max_positions: int,
        block_size: int,
    ) -> Choice:
        rows, most = min(max_tokens, TOKENS_AT_ONCE), -(-max_positions // chosen.size)
        entries = chosen.entries(block_size)
        return cls(
            allocate((max_tokens, chosen.num_heads, entries), torch.int32),
            allocate((max_tokens + 1,), torch.int32),
            allocate((max_tokens,), torch.int32),
            allocate((rows, chosen.num_heads, most), torch.float32),
        )

    @classmethod
    def of_lists(
        cls, allocate: Allocator, max_tokens: int, config: ModelConfig, max_positions: int
    ) -> Choice | None:
        """Return room for what tokens attend to in compressed attentions, if there are some."""
        every, most = config.compressed_attentions, 0
        if not every:
            return None
        for spec in every:
            if spec.compression is not None and spec.indexer is not None:
                most = max(most, max_positions // spec.compression.rate)
        rows = min(max_tokens, TOKENS_AT_ONCE) if most else 1
        entries = max(spec.window + spec.most_entries(max_positions) for spec in every)
        return cls(
            allocate((max_tokens, 1, entries), torch.int32),
            allocate((max_tokens + 1,), torch.int32),
            allocate((max_tokens,), torch.int32),
            allocate((rows, 1, max(most, 1)), torch.float32),
        )


class GpuBuffers:
    """The buffers of a step, all in the model's dtype except the scratch memory of attention.

    Args:
        config: the model's configuration.
        dtype: the model's dtype.
        max_tokens: the largest number of tokens in a step.
        max_requests: the largest number of requests in a step.
        max_samples: the largest number of rows that get logits.
        device: the device.
        deterministic, max_verified: see `AttentionLaunches`.
        max_positions: the length of the longest request, for indexers.
        block_size: the number of tokens in a block of the cache, likewise.

    Attributes:
        max_requests: as given.
        attention: chooses the launches of attention, for which there is scratch memory.
        arena: the arena of the buffers; no step needs contents that an earlier step left there,
            but for counters, which are 0 between launches, as in a new arena.
        streams: [streams, max_tokens, hidden], the residual streams.
        hidden: [max_tokens, hidden], the first of them.
        connections: several streams that layers read a sum of, and what launches their operations;
            None: there are none.
        embeds: [max_tokens, width], the embeddings of a step's tokens: `hidden` itself if they are
            as wide.
        predicted: [max_tokens, hidden], what a layer reads if there are several, else empty.
        levels: [levels, max_tokens, hidden], what images add behind the first layers, else 0.
        normed: [max_tokens, hidden], outputs of norms.
        results: [max_tokens, hidden], where a step leaves its result: one of both.
        spare: [MAX_ROWS, hidden], the other place of the residual stream of few tokens.
        angles: for each rotation, cosines and sines of the tokens' positions, [max_tokens,
            rotary_dim] each.
        window_angles: for each rotation of entries, and the number of tokens of one, the same of
            the first tokens of windows.
        sampled: [max_samples, hidden], the hidden states of the tokens that get logits.
        logits: [max_samples, vocab]; [max_samples, 0] if the model has no LM head; float32 if that
            is.
        exact: [max_samples, hidden] float32, what such an LM head reads, else empty.
        experts: the buffers of each mixture of experts.
        aside: [max_tokens, hidden], what later layers read or add: embeddings, or
            outputs of experts; else empty.
        given: [max_tokens, hidden], the hidden states that a model reads which drafts for
            another one, else empty.
        kept: [max_tokens, levels, hidden], the residual streams that such a model gets.
        routed: [max_tokens, mixtures, top_k], the experts of each token; None: they are not kept.
        per_layer: [max_tokens, layers * width], the inputs that each layer has of its own; None:
            there are none.
        mambas: for each Mamba, [max_tokens, projected_width], the output of `Mamba.x_proj`.
        mamba_parts: for each Mamba, [MAX_ROWS, parts, projected_width] float32, parts of that of
            few tokens.
        choice: the tokens that an indexer chose, or what tokens attend to in compressed
            attentions; None: there is neither.
        relations: the buffers of embeddings of distances; None: there are none.
        counters: int32, those of the launches of attention and recurrent layers.
        many_products: launches products of many rows, for which there is scratch memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        max_tokens: int,
        max_requests: int,
        max_samples: int,
        device: Device,
        deterministic: bool = False,
        max_verified: int = 0,
        max_positions: int = 0,
        block_size: int = 1,
    ) -> None:
        self._config, self._max_positions = config, max_positions
        self._block_size = block_size
        self._dtype = dtype
        self.max_requests = max_requests
        self.attention = AttentionLaunches(
            config, dtype, device.torch_device, deterministic, max_verified
        )
        self._scratch_sizes = self.attention.scratch_sizes(max_tokens, max_requests)
        counter = CountingAllocator()
        self._allocate(counter.allocate, max_tokens, max_samples)
        self.arena = device.make_arena(counter.num_bytes, "the activations of a step")
        self._allocate(self.arena.allocate, max_tokens, max_samples)

    def _allocate(self, allocate: Allocator, max_tokens: int, max_samples: int) -> None:
        config = self._config
        hidden = config.hidden_size

        def buffer(rows: int, width: int) -> Tensor:
            return allocate((rows, width), self._dtype)

        self.streams = allocate((config.num_streams, max_tokens, hidden), self._dtype)
        self.hidden, self.normed = self.streams[0], buffer(max_tokens, hidden)
        # A model without a final norm leaves its result in the residual stream.
        self.results = self.normed if config.final_norm else self.hidden
        self.embeds = self.hidden
        if config.embedding_size is not None:
            self.embeds = buffer(max_tokens, config.embedding_size)
        self.connections = ConnectionOps.allocate(allocate, config, self.hidden)
        self.predicted = buffer(max_tokens if config.altup is not None else 0, hidden)
        self.spare = buffer(MAX_ROWS, hidden)
        self.levels = allocate((config.num_levels, max_tokens, hidden), self._dtype)
        self._attended = {
            width: buffer(max_tokens, width)
            for width in {attention.width for attention in config.all_attentions}
        }
        # A product of what one mixer of a layer returns may wait until another one has run.
        are_apart = any(len(layer.mixers) > 1 for layer in config.loaded_layers)
        shared = {} if are_apart else self._attended
        self._mixed = {
            width: shared[width] if width in shared else buffer(max_tokens, width)
            for width in {mixer.width for mixer in config.mixers if mixer.state_bytes}
        }
        self._low_ranks = {width: buffer(max_tokens, width) for width in low_ranks(config)}
        self._latents = {
            width: buffer(max_tokens, width)
            for width in {each.latent_width for each in config.latent_attentions}
        }
        self._unstored = {
            width: buffer(MAX_ROWS, width)
            for width in {each.in_width for each in config.latent_attentions}
            | {sum(each.first_widths) for each in config.compressed_attentions}
        }
        self._unprojected = {width: buffer(max_tokens, width) for width in query_ranks(config)}
        lists = max_tokens, config, self._max_positions
        self.choice = Choice.of_lists(allocate, *lists)
        if (chosen := chosen_of(config)) is not None:
            sizes = self._max_positions, self._block_size
            self.choice = Choice.allocate(allocate, max_tokens, chosen, *sizes)
        self.relations = RelationBuffers.allocate(allocate, config, self._dtype, max_tokens)
        self._activated = {width: buffer(max_tokens, width) for width in inner_widths(config)}
        self.angles: dict[RopeConfig, tuple[Tensor, Tensor]] = {
            rope: (buffer(max_tokens, rope.rotary_dim), buffer(max_tokens, rope.rotary_dim))
            for rope in config.ropes
        }
        self.window_angles = {
            (rope, rate): (buffer(max_tokens, rope.rotary_dim), buffer(max_tokens, rope.rotary_dim))
            for rope, rate in entry_ropes(config)
        }
        self.sampled, is_exact = buffer(max_samples, hidden), config.lm_head_float32
        self.logits = allocate(
            (max_samples, config.num_logits if config.lm_head else 0),
            torch.float32 if is_exact else self._dtype,
        )
        self.exact = allocate((max_samples if is_exact else 0, hidden), torch.float32)
        self.transformed = buffer(0 if config.transform is None else max_samples, hidden)
        self.experts = {
            spec: ExpertBuffers(allocate, spec, hidden, self._dtype, max_tokens)
            for spec in config.mixtures
        }
        self.routed = allocate_routed(allocate, config, max_tokens)
        self._joined = {width: buffer(max_tokens, width) for width in joined_widths(config)}
        self.aside = buffer(max_tokens if sets_aside(config) else 0, hidden)
        self.given = buffer(max_tokens if config.drafting is not None else 0, hidden)
        self.kept = allocate((max_tokens, len(config.kept_levels), hidden), self._dtype)
        self.per_layer: Tensor | None = None
        if config.per_layer is not None:
            self.per_layer = buffer(max_tokens, config.num_layers * config.per_layer.width)
        self.mambas = {spec: buffer(max_tokens, spec.projected_width) for spec in config.mambas}
        self.mamba_parts = {
            spec: allocate(
                (MAX_ROWS, few_mamba_inputs.num_parts(spec.width), spec.projected_width),
                torch.float32,
            )
            for spec in config.mambas
        }
        self._products = {width: buffer(max_tokens, width) for width in linear_widths(config)}
        self._part_sums, self._part_stats = (
            allocate((size,), torch.float32) for size in self._scratch_sizes
        )
        most = max(map(_num_counters, config.mixers), default=0)
        requests = self.max_requests if self.choice is None else max_tokens
        self.counters = allocate((requests * most,), torch.int32)
        # Parts of tiles depend on the number of rows, float32 has no tensor cores, and matrices
        # that ranks divide have not been measured.
        is_half, is_alone = self._dtype is not torch.float32, config.shard.size == 1
        can_be_many = is_half and is_alone and not self.attention.deterministic
        self.many_products = ManyProducts(self.attention.device, allocate, can_be_many)

    def product(self, width: int) -> Tensor:
        """Return the buffer [max_tokens, width] for the output of a linear layer. All layers of
        that width share it: a decoder has used one output before it computes the next."""
        return self._products[width]

    def attended(self, width: int) -> Tensor:
        """Return the buffer [max_tokens, width] for the output of attention."""
        return self._attended[width]

    def mixed(self, width: int) -> Tensor:
        """Return the buffer [max_tokens, width] for the output of a mixer with a state."""
        return self._mixed[width]

    def latents(self, width: int) -> Tensor:
        """Return the buffer [max_tokens, width] for the queries of a latent attention, projected to
        the width of latents, and for its output before it is projected to values."""
        return self._latents[width]

    def unstored(self, width: int) -> Tensor:
        """Return the buffer [MAX_ROWS, width] for what lies beside latents of few tokens, and for
        these until they are stored: queries are projected meanwhile; or for the product that has
        what queries are a projection of, and a key."""
        return self._unstored[width]

    def low_rank(self, width: int) -> Tensor:
        """Return the buffer [max_tokens, width] for a projection of which another one is a
        projection: both may be equally wide."""
        return self._low_ranks[width]

    def joined(self, width: int) -> Tensor:
        """Return the buffer [max_tokens, width] for two results side by side."""
        return self._joined[width]

    def most_entries(self, spec: CompressedAttentionSpec) -> int:
        """Return the largest number of entries that a token attends to."""
        return spec.most_entries(self._max_positions)

    def unprojected(self, width: int) -> Tensor:
        """Return the buffer [max_tokens, width] for what queries of latent attention, or of a
        compressed one, are a projection of."""
        return self._unprojected[width]

    def activated(self, width: int) -> Tensor:
        """Return the buffer [max_tokens, width] for the output of an MLP's activation."""
        return self._activated[width]

    def scratch(
        self, heads: HeadShape, num_tokens: int, num_splits: int
    ) -> AttentionScratch | None:
        """Return the scratch memory of attention for a launch of `num_tokens` tokens; None if it
        has only one split."""
        if num_splits == 1:
            return None
        shape = num_tokens, heads.num_heads, num_splits
        dim, count = heads.value_dim, prod(shape)
        return AttentionScratch(
            self._part_sums[: count * dim].view(*shape, dim),
            self._part_stats[: count * 2].view(*shape, 2),
            self.counters,
        )


def _num_counters(mixer: MixerSpec) -> int:
    """Return how many groups of programs of a request, or of all requests of few tokens, have one
    that does the work of the last."""
    match mixer:
        case AttentionSpec():
            return mixer.num_kv_heads
        case DeltaNetSpec():
            return mixer.key_heads
        case Mamba2Spec():
            return mixer.groups
        case MambaSpec():
            return few_mamba_inputs.num_row_blocks(mixer.projected_width)
    return 0
