"""Keys, values, and causal attention over them, on the CPU.

Owns the KV cache tensors and how they are laid out; nothing outside this module depends
on the layout. Here a block's tokens lie one behind the other, [block, token, kv head,
dim], so that gathering a request's context copies whole blocks.

A step's requests are put into groups of about equal query length and context length, and
each layer runs one attention call per group, never one per request: all decodes of a
similar context are one call. Within a group queries are padded to the longest and
contexts to whole blocks of the longest; a mask keeps padding and the future out. What it
keeps out must be finite, since 0 times NaN is NaN: the arena starts zeroed, padding reads
the padding block, and float16, which overflows, is saturated when it is written.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from shmllm.core.plan import PADDING_BLOCK_ID
from shmllm.models.config import ModelConfig
from shmllm.worker.arrays import LongArray
from shmllm.worker.batch import InputBatch, StepInputs

MAX_QUERY_ROWS = 256
SMALLEST_CONTEXT_BUCKET = 256


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


@dataclass(frozen=True, slots=True)
class _Span:
    """Queries that attend together to one context: a request's tokens of this step, or a
    piece of them."""

    row: int
    first_token: int
    count: int
    context_len: int


@dataclass(frozen=True, slots=True)
class _Group:
    """Spans of one attention call.

    Attributes:
        query_tokens: (G * Q,) which token each padded query is; padding repeats a token.
        block_ids: (G * B,) the blocks of each padded context.
        masks: window -> (G, 1, Q * heads per kv head, B * block size), additive.
        output_tokens: (n,) tokens whose outputs this group computes.
        output_queries: (n,) where among the G * Q padded queries they are.
    """

    size: int
    query_len: int
    query_tokens: torch.Tensor
    block_ids: torch.Tensor
    masks: dict[int | None, torch.Tensor]
    output_tokens: torch.Tensor
    output_queries: torch.Tensor


class PagedAttention:
    """
    Args:
        config: heads, dimensions and windows.
        cache: (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim), zeroed.
    """

    def __init__(self, config: ModelConfig, cache: torch.Tensor) -> None:
        self._num_kv_heads = config.num_kv_heads
        self._heads_per_kv = config.num_heads // config.num_kv_heads
        self._head_dim = config.head_dim
        self._block_size = cache.shape[3]
        self._dtype = cache.dtype
        self._saturates = cache.dtype is torch.float16
        self._windows = config.layer_windows
        self._distinct_windows = set(config.layer_windows)
        heads = (config.num_kv_heads, config.head_dim)
        self._slots = [tuple(half.view(-1, *heads) for half in layer) for layer in cache]
        self._blocks = [tuple(half.flatten(1) for half in layer) for layer in cache]
        self._slot_mapping = torch.empty(0, dtype=torch.int64)
        self._groups: list[_Group] = []
        self._gathered = [torch.empty(0, dtype=cache.dtype), torch.empty(0, dtype=cache.dtype)]

    def begin_step(self, inputs: StepInputs, batch: InputBatch) -> None:
        self._slot_mapping = torch.from_numpy(inputs.slot_mapping)
        self._groups = [self._make_group(spans, batch) for spans in self._group_spans(inputs)]

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        if self._saturates:
            key, value = (torch.nan_to_num(part, nan=0.0) for part in (key, value))
        key_slots, value_slots = self._slots[layer]
        key_slots.index_copy_(0, self._slot_mapping, key)
        value_slots.index_copy_(0, self._slot_mapping, value)
        if len(self._groups) == 1 and self._groups[0].query_len == 1:
            return self._attend(layer, self._groups[0], query)
        output = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        for group in self._groups:
            attended = self._attend(layer, group, query.index_select(0, group.query_tokens))
            output.index_copy_(
                0, group.output_tokens, attended.index_select(0, group.output_queries)
            )
        return output

    def _attend(self, layer: int, group: _Group, query: torch.Tensor) -> torch.Tensor:
        """(G * Q, num_heads, head_dim) -> (G * Q, num_heads * head_dim).

        The query heads that share a kv head become rows of one matrix: faster than
        repeating keys and values for each of them.
        """
        size, length = group.size, group.query_len
        kv_heads, per_kv, dim = self._num_kv_heads, self._heads_per_kv, self._head_dim
        queries = query.view(size, length, kv_heads, per_kv, dim).permute(0, 2, 1, 3, 4)
        key, value = (
            self._gather(which, blocks, group.block_ids)
            .view(size, -1, kv_heads, dim)
            .transpose(1, 2)
            for which, blocks in enumerate(self._blocks[layer])
        )
        attended = scaled_dot_product_attention(
            queries.reshape(size, kv_heads, length * per_kv, dim),
            key,
            value,
            attn_mask=group.masks[self._windows[layer]],
        )
        return (
            attended.view(size, kv_heads, length, per_kv, dim)
            .permute(0, 2, 1, 3, 4)
            .reshape(size * length, kv_heads * per_kv * dim)
        )

    def _gather(self, which: int, blocks: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """Blocks side by side in a reused buffer: a fresh one would cost its page faults."""
        needed = block_ids.numel() * blocks.shape[1]
        if self._gathered[which].numel() < needed:
            self._gathered[which] = torch.empty(needed * 5 // 4, dtype=self._dtype)
        out = self._gathered[which][:needed].view(-1, blocks.shape[1])
        return torch.index_select(blocks, 0, block_ids, out=out)

    def _group_spans(self, inputs: StepInputs) -> list[list[_Span]]:
        """Spans by power-of-two buckets of query length and context length."""
        groups: dict[tuple[int, int], list[_Span]] = defaultdict(list)
        columns = (inputs.rows, inputs.first_tokens, inputs.counts, inputs.context_lens)
        for row, first, count, context in zip(*(c.tolist() for c in columns), strict=True):
            for offset in range(0, count, MAX_QUERY_ROWS):
                size = min(MAX_QUERY_ROWS, count - offset)
                span = _Span(row, first + offset, size, context - count + offset + size)
                bucket = max(span.context_len, SMALLEST_CONTEXT_BUCKET) - 1
                groups[(size - 1).bit_length(), bucket.bit_length()].append(span)
        return list(groups.values())

    def _make_group(self, spans: list[_Span], batch: InputBatch) -> _Group:
        query_len = max(span.count for span in spans)
        contexts = np.array([span.context_len for span in spans])
        num_blocks = -(-int(contexts.max()) // self._block_size)
        rows = np.array([span.row for span in spans])
        firsts = np.array([span.first_token for span in spans])
        counts = np.array([span.count for span in spans])
        is_held = np.arange(num_blocks) * self._block_size < contexts[:, None]
        within = np.arange(query_len)
        is_query = within < counts[:, None]
        tokens = np.where(is_query, firsts[:, None] + within, firsts[:, None])
        first_positions = contexts - counts
        positions = first_positions[:, None] + np.where(is_query, within, 0)
        return _Group(
            size=len(spans),
            query_len=query_len,
            query_tokens=torch.from_numpy(tokens.ravel()),
            block_ids=torch.from_numpy(
                np.where(is_held, batch.block_table[rows, :num_blocks], PADDING_BLOCK_ID)
                .astype(np.int64)
                .ravel()
            ),
            masks=self._masks(positions, num_blocks * self._block_size),
            output_tokens=torch.from_numpy(tokens[is_query]),
            output_queries=torch.from_numpy(np.flatnonzero(is_query)),
        )

    def _masks(self, positions: LongArray, context: int) -> dict[int | None, torch.Tensor]:
        """positions (G, Q) -> for each window an additive mask, (G, 1, Q * heads per kv, K)."""
        query = torch.from_numpy(positions)[:, :, None]
        key = torch.arange(context)
        masks: dict[int | None, torch.Tensor] = {}
        for window in self._distinct_windows:
            hidden = key > query
            if window is not None:
                hidden |= key <= query - window
            mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
            if positions.shape[1] > 1:
                mask = mask.repeat_interleave(self._heads_per_kv, dim=1)
            masks[window] = mask[:, None]
        return masks
