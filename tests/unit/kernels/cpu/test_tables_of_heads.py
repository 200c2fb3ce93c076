"""CPU attention with a block table for each key-value head has the bits of that with one table."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.emulated_tiles import EMULATED_ATTEND
from support.variants import slow

from shmllm_kernels.cpu import KernelProgram
from shmllm_kernels.cpu.attention import (
    ATTEND,
    MERGE_SPLITS,
    scratch_bytes,
    split_states_bytes,
)
from shmllm_kernels.cpu.attention_pieces import count_pieces, request_words
from shmllm_kernels.cpu.cache_layout import IN_TILES, CacheLayout, head_words

NUM_HEADS, DIM, NUM_BLOCKS, ENTRIES = 6, 32, 90, 80
CONTEXTS = np.array([20, 1, 1100, 33])


def attend(
    layout: CacheLayout, cache: torch.Tensor, query: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """Returns the attention of tokens that are requests of their own, [tokens, heads, dim].

    Args:
        layout: the layout of the cache.
        cache: [blocks, bytes] uint8.
        query: [tokens, NUM_HEADS * DIM].
        table: [tokens, tables, ENTRIES] int32: one of each token, or one for each key-value head.
    """
    tokens, num_tables, _ = table.shape
    kinds, kernels = (layout.stored, "float32"), ATTEND
    if layout.is_tiled:
        kernels = EMULATED_ATTEND
    step, indices = np.array([tokens, tokens]), np.arange(tokens)
    counts, tiles, splits = np.ones_like(indices), *np.zeros((2, tokens + 1), np.int64)
    count_pieces(counts, CONTEXTS, NUM_HEADS // layout.num_kv_heads, tiles, splits)
    arrays = indices, counts, CONTEXTS, indices
    requests = request_words(
        *(each.ctypes.data for each in arrays), table.data_ptr(), num_tables * ENTRIES,
        tiles.ctypes.data, splits.ctypes.data, 4 * ENTRIES if num_tables > 1 else 0,
    )  # fmt: skip
    heads, out = head_words(layout, NUM_HEADS), torch.full_like(query, torch.nan)
    per_thread = scratch_bytes(layout, NUM_HEADS)
    scratch = np.full(per_thread, 0xFF, np.uint8)
    states = np.full(split_states_bytes(layout, NUM_HEADS), 0xFF, np.uint8)
    operands = [
        step.ctypes.data, requests.ctypes.data, heads.ctypes.data, query.data_ptr(),
        4 * query.stride(0), out.data_ptr(), 4 * out.stride(0), cache.data_ptr(), 0,
        scratch.ctypes.data, per_thread, 0, 0, states.ctypes.data, *[0] * 4,
    ]  # fmt: skip
    program = KernelProgram(1)
    program.record(kernels[kinds], operands)
    program.record(MERGE_SPLITS[kinds], operands)
    program.replay()
    return out.unflatten(1, (NUM_HEADS, DIM))


@pytest.mark.parametrize("stored", ["float32", slow("bfloat16"), slow(IN_TILES)])
def test_each_head_reads_its_own_blocks(stored: str) -> None:
    layout = CacheLayout(2, DIM, 16, stored)
    dtype = torch.float32 if stored == "float32" else torch.bfloat16
    numbers = torch.randn(NUM_BLOCKS, layout.block_bytes // dtype.itemsize).to(dtype)
    cache, query = numbers.view(torch.uint8), torch.randn(len(CONTEXTS), NUM_HEADS * DIM)
    every = torch.stack([torch.randperm(NUM_BLOCKS)[:ENTRIES].int() for _ in range(8)])
    table = every.view(4, 2, ENTRIES)
    found = attend(layout, cache, query, table)
    for head in range(2):
        own = slice(3 * head, 3 * head + 3)
        want = attend(layout, cache, query, table[:, head : head + 1].contiguous())
        assert torch.equal(found[:, own], want[:, own])
    assert not torch.equal(found[:, :3], want[:, :3])
