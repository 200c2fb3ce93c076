"""Keys, values, and causal attention over them, on the CPU.

Owns the KV cache tensors and how they are laid out; nothing outside this module depends
on the layout. A block's tokens lie one behind the other, [block, token, kv head, dim].
Every token is written there, where the prefix cache finds it, and into its request's slab
(`slabs`), where attention reads it: [kv head, token, dim] without gathering.

Each layer runs one attention call per group of requests (`attention_groups`), never one
per request. Within a group contexts are padded to the longest; a mask keeps padding and the
future out. What it keeps out must be finite, since 0 times NaN is NaN: memory starts
zeroed, and float16, which overflows, is saturated when it is written.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from shmllm.models.config import ModelConfig
from shmllm.worker.arrays import LongArray
from shmllm.worker.attention_groups import (
    AnyShapes,
    CallShapes,
    Group,
    context_limits,
    cut_spans,
    make_groups,
)
from shmllm.worker.attention_masks import MaskMaker
from shmllm.worker.batch import NO_ROWS, InputBatch, StepInputs
from shmllm.worker.slabs import Slabs

ANY_SHAPES = AnyShapes()


class AttentionBackend(Protocol):
    """What the runner needs of an attention implementation and its KV cache."""

    def begin_step(self, inputs: StepInputs, batch: InputBatch) -> None:
        """Prepare what all layers of the step share."""

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write the step's keys and values, then attend.

        Args:
            query: (T, num_heads, head_dim).
            key: (T, num_kv_heads, head_dim), as `value`.

        Returns:
            (T, num_heads * head_dim).
        """


class PagedAttention:
    """
    Args:
        config: heads, dimensions and windows.
        cache: (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim), zeroed.
        slabs: for as many rows as the batch has, and for the longest padded context.
        shapes: of attention calls.
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: torch.Tensor,
        slabs: Slabs,
        shapes: CallShapes = ANY_SHAPES,
    ) -> None:
        self._shapes = shapes
        self._num_kv_heads = config.num_kv_heads
        self._heads_per_kv = config.num_heads // config.num_kv_heads
        self._head_dim = config.head_dim
        self._block_size = cache.shape[3]
        self._dtype = cache.dtype
        self._saturates = cache.dtype is torch.float16
        self._windows = config.layer_windows
        heads = (config.num_kv_heads, config.head_dim)
        self._slots = [tuple(half.view(-1, *heads) for half in layer) for layer in cache]
        self._blocks = [tuple(half.flatten(1) for half in layer) for layer in cache]
        self._slabs = slabs
        self._in_slabs = [
            (_by_token(keys), _by_token(values))
            for keys, values in zip(slabs.keys, slabs.values, strict=True)
        ]
        self._mask = MaskMaker(config, cache.dtype, always=shapes.always_masked)
        self._gathered = [torch.empty(0, dtype=cache.dtype), torch.empty(0, dtype=cache.dtype)]
        self._slot_mapping = torch.empty(0, dtype=torch.int64)
        self._groups: list[Group] = []
        self._missing: list[tuple[int, int, int, torch.Tensor]] = []
        self._decoding = NO_ROWS
        self._limits = NO_ROWS
        self._is_covered = np.zeros(0, np.bool_)
        self._slab_places = torch.empty(0, dtype=torch.int64)
        self._slab_tokens: torch.Tensor | None = None

    @property
    def workspace_bytes(self) -> int:
        """Memory that is kept between steps besides keys and values."""
        return sum(buffer.nbytes for buffer in self._gathered)

    def drop_workspace(self) -> None:
        """Let go of it, of the slabs, and of what the last step left."""
        self.release()
        self._gathered = [buffer.new_empty(0) for buffer in self._gathered]
        self._groups, self._missing = [], []

    def begin_step(self, inputs: StepInputs, batch: InputBatch) -> None:
        self._slot_mapping = torch.from_numpy(inputs.slot_mapping)
        contexts = inputs.context_lens
        if self._goes_on(inputs):
            self._slabs.advance(inputs.rows, self._is_covered)
            self._missing = []
        else:
            contexts = self._lay_out(inputs, batch)
        self._place_in_slabs(inputs)
        for group in self._groups:
            of_members = contexts[group.spans.index]
            group.see(of_members, batch, self._shapes)
            group.masks = self._mask(group, of_members)

    def release(self) -> None:
        """Give back what the slabs hold. Running requests have them filled again."""
        self._slabs.release()
        self._decoding = NO_ROWS

    @property
    def slab_bytes(self) -> int:
        """Pages of the slabs that were touched."""
        return self._slabs.resident_bytes

    def _goes_on(self, inputs: StepInputs) -> bool:
        """Whether this step is the last one again, one token further on."""
        return (
            len(inputs.positions) == len(inputs.rows) == len(self._decoding)
            and not len(inputs.fresh_rows)
            and bool((inputs.rows == self._decoding).all())
            and bool((inputs.context_lens <= self._limits).all())
        )

    def _lay_out(self, inputs: StepInputs, batch: InputBatch) -> LongArray:
        """Find room in slabs, and groups. Returns the context of each span."""
        rows, contexts = inputs.rows, inputs.context_lens
        starts = contexts - inputs.counts
        covered, missing = self._slabs.cover(rows, starts, contexts, inputs.fresh_rows)
        self._is_covered = covered
        self._missing = [
            (int(rows[i]), begin, end, self._block_ids(batch, rows[i], begin, end))
            for i, begin, end in missing
        ]
        is_decode = len(inputs.positions) == len(rows)
        self._decoding = rows if is_decode else NO_ROWS
        if is_decode:
            room = np.where(covered, self._slabs.room(rows), contexts)
            self._limits = np.minimum(context_limits(contexts), room)
        spans = cut_spans(inputs, self._shapes.longest_query)
        if len(spans) > len(rows):
            owners = np.searchsorted(inputs.first_tokens, spans.first_tokens, "right") - 1
            covered = covered[owners]
        self._groups = make_groups(spans[covered], True, self._shapes)
        self._groups += make_groups(spans[~covered], False, self._shapes)
        return spans.contexts

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        if self._saturates:
            key, value = (torch.nan_to_num(part, nan=0.0) for part in (key, value))
        self._write(layer, key, value)
        if len(self._groups) == 1 and self._groups[0].tokens is not None:
            return self._attend(layer, self._groups[0], query)
        output = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        for group in self._groups:
            if group.tokens is not None:
                output[group.tokens] = self._attend(layer, group, query[group.tokens])
                continue
            attended = self._attend(layer, group, query.index_select(0, group.query_tokens))
            output.index_copy_(
                0, group.output_tokens, attended.index_select(0, group.output_queries)
            )
        return output

    def _attend(self, layer: int, group: Group, query: torch.Tensor) -> torch.Tensor:
        """(G * Q, num_heads, head_dim) -> (G * Q, num_heads * head_dim).

        Each kv head of each place is a batch entry, and the query heads that share it are
        rows of one matrix: faster than repeating keys and values for each of them.
        """
        size, length = group.size, group.query_len
        kv_heads, per_kv, dim = self._num_kv_heads, self._heads_per_kv, self._head_dim
        if length > 1:
            query = query.view(size, length, kv_heads, per_kv, dim).transpose(1, 2)
        key, value = self._contexts(layer, group)
        attended = scaled_dot_product_attention(
            query.reshape(size * kv_heads, 1, length * per_kv, dim),
            key,
            value,
            attn_mask=group.masks[self._windows[layer]],
        )
        if length > 1:
            attended = attended.view(size, kv_heads, length, per_kv, dim).transpose(1, 2)
        return attended.reshape(size * length, kv_heads * per_kv * dim)

    def _contexts(self, layer: int, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, (G * kv heads, 1, context, dim)."""
        if group.block_ids is not None:
            key, value = (self._gather(which, layer, group) for which in range(2))
            return key, value
        slabs, heads, dim = self._slabs, self._num_kv_heads, self._head_dim
        row = slabs.capacity * dim
        size = (group.size * heads, 1, group.context, dim)
        stride = (row, row, dim, 1)
        skipped = group.first_row * heads * row
        keys, values = slabs.keys[layer], slabs.values[layer]
        return (
            keys.as_strided(size, stride, keys.storage_offset() + skipped),
            values.as_strided(size, stride, values.storage_offset() + skipped),
        )

    def _gather(self, which: int, layer: int, group: Group) -> torch.Tensor:
        """Blocks side by side in a reused buffer: a fresh one would cost its page faults."""
        blocks, block_ids = self._blocks[layer][which], group.block_ids
        assert block_ids is not None
        needed = block_ids.numel() * blocks.shape[1]
        if self._gathered[which].numel() < needed:
            self._gathered[which] = torch.empty(needed * 5 // 4, dtype=self._dtype)
        out = self._gathered[which][:needed].view(-1, blocks.shape[1])
        torch.index_select(blocks, 0, block_ids, out=out)
        heads = (self._num_kv_heads, self._head_dim)
        contexts = out.view(group.size, -1, *heads)[:, : group.context].transpose(1, 2)
        return contexts.reshape(-1, 1, group.context, self._head_dim)

    def _write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Into the blocks; then into slabs what these lack, which may be of this step, too."""
        for part, slots in zip((key, value), self._slots[layer], strict=True):
            slots.index_copy_(0, self._slot_mapping, part)
        for row, begin, end, block_ids in self._missing:
            self._copy_blocks(layer, row, begin, end, block_ids)
        if not self._slab_places.shape[0]:
            return
        for part, places in zip((key, value), self._in_slabs[layer], strict=True):
            if self._slab_tokens is not None:
                part = part.index_select(0, self._slab_tokens)
            places.index_copy_(0, self._slab_places, part)

    def _copy_blocks(
        self, layer: int, row: int, begin: int, end: int, block_ids: torch.Tensor
    ) -> None:
        skipped = begin % self._block_size
        slabs = (self._slabs.keys[layer], self._slabs.values[layer])
        for slab, blocks in zip(slabs, self._blocks[layer], strict=True):
            tokens = blocks.index_select(0, block_ids).view(-1, *slab.shape[1::2])
            slab[row, :, begin:end] = tokens[skipped : skipped + end - begin].transpose(0, 1)

    def _block_ids(self, batch: InputBatch, row: int, begin: int, end: int) -> torch.Tensor:
        """The blocks of a row that hold its tokens from `begin` to `end`."""
        size = self._block_size
        ids = batch.block_table[row, begin // size : -(-end // size)]
        return torch.from_numpy(ids.astype(np.int64))

    def _place_in_slabs(self, inputs: StepInputs) -> None:
        """Where in `_in_slabs` each token of a covered row goes."""
        rows, is_covered = inputs.rows, self._is_covered
        if len(inputs.positions) > len(rows):
            rows = np.repeat(rows, inputs.counts)
            is_covered = np.repeat(is_covered, inputs.counts)
        places = rows * (self._num_kv_heads * self._slabs.capacity) + inputs.positions
        self._slab_tokens = None
        if not is_covered.all():
            self._slab_tokens = torch.from_numpy(np.flatnonzero(is_covered))
            places = places[is_covered]
        self._slab_places = torch.from_numpy(places)


def _by_token(slab: torch.Tensor) -> torch.Tensor:
    """(rows, heads, capacity, dim) -> (places, heads, dim): a token of row r at position p is
    at r * heads * capacity + p. The view overlaps itself; tokens do not."""
    rows, heads, capacity, dim = slab.shape
    places = max(rows * heads * capacity - (heads - 1) * capacity, 0)
    return slab.as_strided((places, heads, dim), (dim, capacity * dim, 1), slab.storage_offset())
