"""The buffers for a step's activations and logits, at fixed addresses.

The kernel provides pages when they are first written, so that the buffers take only the memory
that the largest step so far has used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.config import ModelConfig, RopeConfig
from shmllm.models.entries import entry_ropes
from shmllm.models.layers import Allocator
from shmllm.models.widths import (
    chosen_of,
    inner_widths,
    joined_widths,
    linear_widths,
    low_ranks,
    mixed_widths,
    num_listed,
    num_relations,
    query_ranks,
    read_widths,
    sets_aside,
)
from shmllm.worker.arena import CountingAllocator
from shmllm.worker.cpu.arena import HostArena
from shmllm.worker.cpu.experts import ExpertBuffers
from shmllm.worker.cpu.mamba import MambaBuffers
from shmllm.worker.cpu.product_kernels import rounded_bytes
from shmllm.worker.cpu.relations import RelationBuffers
from shmllm.worker.group import Alone, Group
from shmllm.worker.routed_experts import allocate_routed

SCORED_ROWS = 64
"""The number of rows whose logits are computed at a time for the log-probabilities of prompts."""


class CpuBuffers:
    """The buffers of a step, all float32 but `rounded`, `chosen` and some of `experts`.

    Args:
        config: the model's configuration.
        max_tokens: the largest number of tokens in a step.
        max_samples: the largest number of tokens that a step samples.
        activation_dtype: the dtype name that products round activations to.
        group: the group whose ranks share some of the buffers.
        block_size: the number of tokens in a block of the cache.

    Attributes:
        streams: [streams, max_tokens, hidden], the residual streams.
        hidden: [max_tokens, hidden], the first of them.
        connected: [max_tokens, streams * hidden], those that connections read, side by side, else
            empty.
        stream_gates: [max_tokens, gates], those of a connection, else empty.
        predicted: [max_tokens, hidden], what a layer reads if there are several, else empty.
        looked_up: [max_tokens, width], the embeddings of a step's tokens: `hidden` itself if they
            are as wide.
        embeds: [max_tokens, width], where they are looked up: `looked_up` itself unless a group
            shares them.
        levels: [levels, max_tokens, hidden], what images add behind the first layers, or None.
        normed: [max_tokens, hidden], outputs of norms.
        angles: for each rotation, cosines and sines of the tokens' positions, [max_tokens,
            rotary_dim / 2] each.
        window_angles: for each rotation of entries, and the number of tokens of one, the same of
            the first tokens of windows.
        listed: [max_tokens, keys] int64, the addresses of what each token attends to in a
            compressed attention; empty: there is none.
        chosen: [max_tokens, entries] int32, the slots that an indexer chose for each token, or the
            blocks for each of its heads; None: there is none.
        experts: for each mixture of experts, its buffers.
        mambas: for each Mamba, its buffers.
        sampled: [max_samples, hidden], the hidden states of the tokens that get logits.
        logits: [max_samples, vocab].
        scored: [SCORED_ROWS, hidden], hidden states of prompt tokens that are scored.
        scored_logits: [SCORED_ROWS, vocab], the logits of `scored`.
        aside: [max_tokens, hidden], what later layers read or add: embeddings, or
            outputs of experts; else empty.
        given: [max_tokens, hidden], the hidden states that a model reads which drafts for
            another one, else empty.
        kept: [max_tokens, levels, hidden], the residual streams that such a model gets.
        routed: [max_tokens, mixtures, top_k], the experts of each token; None: they are not kept.
        per_layer: [max_tokens, layers * width], the inputs that each layer has of its own; None:
            there are none.
        gated: [max_tokens, width], such inputs of one layer times their gates, or None.
        relations: those of embeddings of distances; None: there are none.
        rounded: memory for the rounded activations of any product, bytes; None: they stay float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_tokens: int,
        max_samples: int,
        activation_dtype: str = "float32",
        group: Group | None = None,
        block_size: int = 1,
    ) -> None:
        self._group = group or Alone()
        sizes = max_tokens, max_samples, block_size
        counter = CountingAllocator()
        self._allocate(counter.allocate, config, *sizes, activation_dtype)
        self._arena = HostArena(counter.num_bytes, "the activations of a step")
        self._allocate(self._arena.allocate, config, *sizes, activation_dtype)

    def _allocate(
        self,
        allocate: Allocator,
        config: ModelConfig,
        max_tokens: int,
        max_samples: int,
        block_size: int,
        activation_dtype: str,
    ) -> None:
        def buffer(rows: int, width: int) -> Tensor:
            return allocate((rows, width), torch.float32)

        hidden = config.hidden_size
        self.streams = allocate((config.num_streams, max_tokens, hidden), torch.float32)
        self.hidden, self.normed = self.streams[0], buffer(max_tokens, hidden)
        self.connected = buffer(max_tokens, config.connected_width)
        connections = config.connections
        num_gates = 0 if connections is None else connections.num_gates
        self.stream_gates = buffer(max_tokens, num_gates)
        self.predicted = buffer(max_tokens if config.altup is not None else 0, hidden)
        self._attended = {width: buffer(max_tokens, width) for width in mixed_widths(config)}
        self._low_ranks = {width: buffer(max_tokens, width) for width in low_ranks(config)}
        self._latents = {
            width: buffer(max_tokens, width)
            for width in {each.latent_width for each in config.latent_attentions}
        }
        self.listed = allocate((max_tokens, num_listed(config)), torch.int64)
        self.chosen: Tensor | None = None
        if (chosen := chosen_of(config)) is not None:
            most = chosen.num_heads * chosen.entries(block_size)
            self.chosen = allocate((max_tokens, most), torch.int32)
        self._activated = {width: buffer(max_tokens, width) for width in inner_widths(config)}
        halves = {rope: rope.rotary_dim // 2 for rope in config.ropes}
        self.angles: dict[RopeConfig, tuple[Tensor, Tensor]] = {
            rope: (buffer(max_tokens, half), buffer(max_tokens, half))
            for rope, half in halves.items()
        }
        self.window_angles = {
            (rope, rate): (buffer(max_tokens, halves[rope]), buffer(max_tokens, halves[rope]))
            for rope, rate in entry_ropes(config)
        }
        self.sampled = buffer(max_samples, hidden)
        self.looked_up = self.hidden
        if config.embedding_size is not None:
            self.looked_up = buffer(max_tokens, config.embedding_size)
        self.embeds, vocab = self.looked_up, config.num_logits
        num_levels = config.num_levels
        self.levels: Tensor | None = None
        if num_levels:
            self.levels = self._levels(allocate, (num_levels, max_tokens, hidden))
        if self._group.shard.size > 1:
            self._share(max_tokens, max_samples, hidden, vocab)
        else:
            self.scored = buffer(SCORED_ROWS, hidden)
            self.logits, self.scored_logits = buffer(max_samples, vocab), buffer(SCORED_ROWS, vocab)
        self.experts = {
            spec: ExpertBuffers(allocate, spec, hidden, max_tokens) for spec in config.mixtures
        }
        self.routed = allocate_routed(allocate, config, max_tokens)
        self.mambas = {spec: MambaBuffers(allocate, spec, max_tokens) for spec in config.mambas}
        self._products = {width: buffer(max_tokens, width) for width in linear_widths(config)}
        self._unprojected = {width: buffer(max_tokens, width) for width in query_ranks(config)}
        self._joined = {width: buffer(max_tokens, width) for width in joined_widths(config)}
        self.aside = buffer(max_tokens if sets_aside(config) else 0, hidden)
        self.given = buffer(max_tokens if config.drafting is not None else 0, hidden)
        self.kept = allocate((max_tokens, len(config.kept_levels), hidden), torch.float32)
        self.per_layer: Tensor | None = None
        self.gated: Tensor | None = None
        if config.per_layer is not None:
            self.per_layer = buffer(max_tokens, config.num_layers * config.per_layer.width)
            self.gated = buffer(max_tokens, config.per_layer.width)
        self.relations = RelationBuffers.allocate(allocate, config, max_tokens)
        self.rounded: Tensor | None = None
        if activation_dtype != "float32":
            widest = max(read_widths(config))
            most_rows = max(max_tokens, max_samples, SCORED_ROWS)
            most_rows = max(most_rows, num_relations(config))
            sizes = [(most_rows, widest)]
            if activation_dtype in ("int8", "int16"):  # those of experts, by groups
                sizes += [(max_tokens * spec.top_k, spec.inner) for spec in config.mixtures]
            size = max(rounded_bytes(*each, activation_dtype) for each in sizes)
            self.rounded = allocate((size,), torch.uint8)

    def _levels(self, allocate: Allocator, sizes: tuple[int, int, int]) -> Tensor:
        if self._group.shard.size > 1:
            return self._group.floats("levels", *sizes)
        return allocate(sizes, torch.float32)

    def _share(self, max_tokens: int, max_samples: int, hidden: int, vocab: int) -> None:
        floats = self._group.floats
        self.embeds = floats("embeds", max_tokens, self.embeds.shape[1])
        self.scored = floats("scored", SCORED_ROWS, hidden)
        self.logits = floats("logits", max_samples, vocab)
        self.scored_logits = floats("scored logits", SCORED_ROWS, vocab)

    def product(self, width: int) -> Tensor:
        """Return the buffer [max_tokens, width] for the output of a linear layer. All layers of
        that width share it: a decoder has used one output before it computes the next."""
        return self._products[width]

    def attended(self, width: int) -> Tensor:
        """Return the buffer [max_tokens, width] for the output of attention, or of what takes its
        place."""
        return self._attended[width]

    def low_rank(self, width: int) -> Tensor:
        """Return the buffer [max_tokens, width] for a projection of which another one is a
        projection: both may be equally wide."""
        return self._low_ranks[width]

    def joined(self, width: int) -> Tensor:
        """Return the buffer [max_tokens, width] for two results side by side."""
        return self._joined[width]

    def unprojected(self, width: int) -> Tensor:
        """Return the buffer [max_tokens, width] for what queries of latent attention are a
        projection of."""
        return self._unprojected[width]

    def latents(self, width: int) -> Tensor:
        """Return the buffer [max_tokens, width] for the queries of a latent attention, projected to
        the width of latents, and for its output before it is projected to values."""
        return self._latents[width]

    def activated(self, width: int) -> Tensor:
        """Return the buffer [max_tokens, width] for the output of an MLP's activation."""
        return self._activated[width]

    @property
    def workspace_bytes(self) -> int:
        """The memory that the buffers take now."""
        return self._arena.resident_bytes

    def drop_workspace(self) -> None:
        """Give the buffers' memory back. Called between steps."""
        self._arena.release()
        self._arena.restore()
