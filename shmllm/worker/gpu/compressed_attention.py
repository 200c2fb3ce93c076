"""A compressed attention on a GPU: its kernels, and what they read of the cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from shmllm.models.compressed_attention import CompressedAttention, EntryWeights
from shmllm.models.layers import Linear
from shmllm.worker.gpu.attention import AttentionStep
from shmllm.worker.gpu.attention_launches import HeadShape
from shmllm.worker.gpu.buffers import Choice, GpuBuffers
from shmllm.worker.gpu.cache import GpuKVCache
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm.worker.gpu.latent_attention import multiply_heads
from shmllm_kernels.gpu.compression import CacheRows, Made, compress
from shmllm_kernels.gpu.indexer import RequestTables
from shmllm_kernels.gpu.last_rotated import rotate_heads, store_keys, store_rows
from shmllm_kernels.gpu.latent_attention import paged_latent_attention
from shmllm_kernels.gpu.listed_keys import Entries, Pages, Scored, list_keys, unit_of

LinearOf = Callable[[Any, Linear], Tensor]


class CompressedAttentionOps:
    """Launches the operations of `models.compressed_ops.CompressedOps`.

    Args:
        cache: the KV cache.
        inputs: the step's inputs.
        buffers: the buffers for the results.
    """

    def __init__(self, cache: GpuKVCache, inputs: GpuInputs, buffers: GpuBuffers) -> None:
        self._cache = cache
        self._inputs = inputs
        self._buffers = buffers

    def begin(self, step: AttentionStep) -> None:
        """See `AttentionOps.begin`."""
        self._step = step

    def store_keys(self, x: Tensor, attention: CompressedAttention) -> None:
        """See `CompressedOps.store_keys`."""
        norm, (group, rows, _) = attention.key_norm, self._cache.layers[attention.layer]
        keys, slots = x[:, -attention.spec.head_dim :], self._slots(group, len(x))
        angles = self._angles(attention, len(x))
        store_keys(rows[:, :, 0], keys, norm.weight, norm.spec.eps, *angles, slots)

    def compress(self, x: Tensor, attention: CompressedAttention) -> None:
        """See `CompressedOps.compress`."""
        entries = attention.entries
        assert entries is not None, "the layer has entries"
        group, _, parts = self._cache.layers[attention.layer]
        _, made, of_index = self._cache.entries[attention.layer]
        store_rows(parts[:, :, 0], x, self._slots(group, len(x)))
        self._compress(len(x), attention, entries, 0, made[:, :, 0])
        if attention.indexer is not None:
            self._compress(len(x), attention, attention.indexer.entries, 2, of_index[:, :, 0])

    def _compress(
        self,
        num_tokens: int,
        attention: CompressedAttention,
        weights: EntryWeights,
        part: int,
        rows: Tensor,
    ) -> None:
        """Launch what makes entries.

        Args:
            num_tokens: the number of tokens of the step.
            attention: the layer.
            weights: those of the entries.
            part: the index of their values in `CompressedAttentionSpec.parts`; gates are behind.
            rows: [blocks, rows of a block, width], where they are stored.
        """
        spec, norm = attention.spec, weights.norm
        assert spec.compression is not None, "the layer has entries"
        rate, overlaps = spec.compression.rate, spec.compression.overlaps
        group, _, parts = self._cache.layers[attention.layer]
        tables = self._tables(group)
        angles = self._buffers.window_angles[spec.rope, rate]
        compress(
            CacheRows(rows, self._tables(self._cache.entries[attention.layer][0]).block_table),
            CacheRows(parts[:, :, 0], tables.block_table),
            Made(rate, overlaps, sum(spec.parts[:part])),
            weights.bias,
            norm.weight,
            norm.spec.eps,
            angles[0][:num_tokens],
            angles[1][:num_tokens],
            tables.query_starts,
            tables.context_lens,
        )

    def list_keys(
        self, x: Any, latent: Any, attention: CompressedAttention, linear: LinearOf
    ) -> None:
        """See `CompressedOps.list_keys`; ``linear`` launches the products of an indexer, and takes
        ``x`` and ``latent``."""
        spec, choice, num_tokens = attention.spec, self._choice, self._step.descriptor.num_tokens
        group, rows, _ = self._cache.layers[attention.layer]
        _, keys, pages = self._pages(attention)
        entries = None
        if spec.compression is not None:
            scored = self._scored(x, latent, attention, linear)
            table = self._tables(self._cache.entries[attention.layer][0]).block_table
            most = self._buffers.most_entries(spec)
            entries = Entries(pages, table, spec.compression.rate, most, scored)
        list_keys(
            choice.table[:num_tokens, 0],
            choice.starts[: num_tokens + 1],
            choice.lens[:num_tokens],
            choice.scores[:, 0],
            self._tables(group),
            keys,
            spec.window,
            rows.shape[1],
            entries,
        )

    def _scored(
        self, x: Any, latent: Any, attention: CompressedAttention, linear: LinearOf
    ) -> Scored | None:
        """Launch the products of an indexer; return what it chooses by. None: there is none."""
        indexer, spec = attention.indexer, attention.spec.indexer
        if indexer is None or spec is None:
            return None
        weights, query = linear(x, indexer.head_weights), linear(latent, indexer.query)
        heads = query.unflatten(1, (spec.num_heads, -1))
        _, _, keys = self._cache.entries[attention.layer]
        return Scored(heads, weights, keys[:, :, 0], *self._angles(attention, len(query)))

    def attend(self, query: Tensor, attention: CompressedAttention) -> Tensor:
        """See `CompressedOps.attend_to_lists`."""
        spec = attention.spec
        heads = query.unflatten(1, (spec.num_heads, -1))
        angles = self._angles(attention, len(query))
        rotate_heads(heads, *angles, spec.norm_eps)
        self._step.launch(partial(self._attend, heads, attention))
        rotate_heads(heads, *angles, is_back=True)
        out = self._buffers.attended(spec.width)[: len(query)]
        groups = spec.groups, -1
        multiply_heads(out.unflatten(1, groups), query.unflatten(1, groups), attention.group_proj)
        return out

    def _attend(self, heads: Tensor, attention: CompressedAttention) -> None:
        """Replace queries, [tokens, heads, head_dim], by the attention's output."""
        step, choice, spec = self._step.descriptor, self._choice, attention.spec
        num_tokens = step.num_reqs if step.uniform else len(heads)
        shape, (unit, *_) = HeadShape.of(spec), self._pages(attention)
        launch = self._step.launches[shape]
        heads = heads[:num_tokens]
        paged_latent_attention(
            heads,
            heads,
            heads[..., :0],
            self._cache.elements.unfold(0, spec.head_dim, unit)[:, None],
            choice.table[:num_tokens, 0],
            choice.starts[: num_tokens + 1],
            choice.lens[:num_tokens],
            launch.config,
            spec.scale,
            launch.num_splits,
            self._buffers.scratch(shape, num_tokens, launch.num_splits),
            has_slots=True,
            sinks=attention.sinks,
        )

    @property
    def _choice(self) -> Choice:
        assert self._buffers.choice is not None, "the model has lists"
        return self._buffers.choice

    def _angles(self, attention: CompressedAttention, num_tokens: int) -> tuple[Tensor, Tensor]:
        cos, sin = self._buffers.angles[attention.spec.rope]
        return cos[:num_tokens], sin[:num_tokens]

    def _slots(self, group: int, num_tokens: int) -> Tensor:
        return self._inputs.step.slots[group, :num_tokens]

    def _tables(self, group: int) -> RequestTables:
        """Return the tables of the step's requests, with the blocks of a group of layers."""
        num_reqs, step = self._step.descriptor.num_reqs, self._inputs.step
        table = self._inputs.block_tables[group, :num_reqs]
        return RequestTables(table, step.query_starts[: num_reqs + 1], step.context_lens[:num_reqs])

    def _pages(self, attention: CompressedAttention) -> tuple[int, Pages, Pages]:
        """Return how many elements a unit has, and where keys and entries are in such units. If
        there are no entries, the place of the keys stands for theirs."""
        layer, begin = attention.layer, int(self._cache.elements.storage_offset())
        stored = [self._cache.layers[layer][1]]
        if attention.entries is not None:
            stored.append(self._cache.entries[layer][1])
        every = [
            Pages(int(rows.storage_offset()) - begin, *map(int, rows.stride()[:2]))
            for rows in stored
        ]
        unit = unit_of(*every)
        assert len(self._cache.elements) // unit < 2**31, "places are 32 bits"
        return unit, every[0].over(unit), every[-1].over(unit)


class CompressedLaunches:
    """The operations of `models.compressed_ops.CompressedOps`, for who inherits them.

    Attributes:
        lists: launches them.
    """

    lists: CompressedAttentionOps
    linear: LinearOf

    def store_keys(self, x: Tensor, attention: CompressedAttention) -> Tensor:
        self.lists.store_keys(x, attention)
        return x

    def compress(self, x: Tensor, attention: CompressedAttention) -> None:
        self.lists.compress(x, attention)

    def list_keys(self, x: Tensor, latent: Tensor, attention: CompressedAttention) -> None:
        self.lists.list_keys(x, latent, attention, self.linear)

    def attend_to_lists(self, query: Tensor, attention: CompressedAttention) -> Tensor:
        return self.lists.attend(query, attention)
