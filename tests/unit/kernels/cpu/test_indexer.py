"""CPU indexers: what they store and choose is what the reference does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.kernel_helpers import poisoned

from shmllm_kernels.cpu import KernelProgram, word_of_float
from shmllm_kernels.cpu.attention_pieces import request_words
from shmllm_kernels.cpu.indexer import (
    CHOOSE_TOKENS,
    STORE_INDEX_KEYS,
    index_words,
    scratch_bytes,
)
from shmllm_kernels.cpu.latent_layout import DTYPES, LatentLayout
from shmllm_kernels.reference import indexer as reference

MIXED = ((1, 21), (5, 5), (1, 1), (19, 30), (1, 700))
KEY_DIM, BLOCK_SIZE, NUM_THREADS = 40, 8, 2


class Layer:
    """A layer's cache, in which the index keys of some requests' tokens are stored.

    Args:
        lengths: for each request (tokens in the step, context length).
        heads, dim, rope_dim, top_k, interleaved: those of the indexer.
        stored: the dtype name of the cache, and of weights.
    """

    def __init__(
        self,
        lengths: tuple[tuple[int, int], ...],
        heads: int,
        dim: int,
        rope_dim: int,
        top_k: int,
        interleaved: bool,
        stored: str,
    ) -> None:
        self.lengths, self.heads, self.dim, self.top_k = lengths, heads, dim, top_k
        self.rope_dim, self.interleaved, self.stored = rope_dim, interleaved, stored
        self.layout = LatentLayout(KEY_DIM, BLOCK_SIZE, stored, dim)
        contexts = [context for _, context in lengths]
        blocks = [-(-context // BLOCK_SIZE) for context in contexts]
        order = torch.randperm(sum(blocks) + 3).int()
        size = self.layout.block_bytes + 64  # blocks of other layers lie between those of this one
        self.cache = torch.full((len(order), size), 0xFF, dtype=torch.uint8)
        self.table = torch.full((len(lengths), max(blocks)), 2**30, dtype=torch.int32)
        slots = []
        for row, (ids, context) in enumerate(
            zip(order[: sum(blocks)].split(blocks), contexts, strict=True)
        ):
            self.table[row, : len(ids)] = ids
            positions = torch.arange(context)
            slots.append(ids.long()[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE)
        self.slots = torch.cat(slots)
        self.plain = poisoned(
            len(order), BLOCK_SIZE, dim, dtype=getattr(torch, stored), device="cpu"
        )

    def angles(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws the cosines and sines of some positions, [count, pairs]."""
        angles = torch.randn(count, self.rope_dim // 2)
        return angles.cos(), angles.sin()

    def store(self) -> torch.Tensor:
        """Stores keys of all contexts, here and in `plain`; returns what they were made of."""
        dtype, layout = getattr(torch, self.stored), self.layout
        x = torch.randn(len(self.slots), self.dim) * 3 + 1
        weight, bias = torch.randn(2, self.dim).to(dtype)
        cos, sin = self.angles(len(x))
        rest = weight, bias, 1e-6, *tables(cos, sin), self.slots, self.interleaved
        reference.store_index_keys(self.plain, x, *rest)
        source, count = x.clone(), np.array([len(x)])
        program = KernelProgram(NUM_THREADS)
        operands = [
            count.ctypes.data, source.data_ptr(), 4 * self.dim, self.dim, self.rope_dim // 2,
            int(self.interleaved), cos.data_ptr(), sin.data_ptr(), weight.data_ptr(),
            bias.data_ptr(), word_of_float(1e-6), self.slots.data_ptr(),
            self.cache.data_ptr() + layout.index_offset, layout.row_bytes,
            BLOCK_SIZE.bit_length() - 1, self.cache.stride(0),
        ]  # fmt: skip
        program.record(STORE_INDEX_KEYS[self.stored, self.stored], operands)
        program.replay()
        return source

    def choose(
        self, query: torch.Tensor, weights: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Returns the slots of the chosen tokens, [tokens, top_k]; -7: none."""
        counts, contexts = (np.array(each) for each in zip(*self.lengths, strict=True))
        firsts, rows = np.cumsum(counts) - counts, np.arange(len(counts))
        ends = zip(contexts - counts, contexts, strict=True)
        positions = np.concatenate([np.arange(*each) for each in ends])
        step = np.array([len(query), len(counts)])
        requests = request_words(
            firsts.ctypes.data, 0, 0, rows.ctypes.data, self.table.data_ptr(), self.table.shape[1],
            0, 0,
        )  # fmt: skip
        layout = self.layout
        chosen = torch.full((len(query), self.top_k), -7, dtype=torch.int32)
        per_thread = scratch_bytes(layout, self.heads, self.table.shape[1] * BLOCK_SIZE)
        scratch = torch.full((NUM_THREADS, per_thread), 0xFF, dtype=torch.uint8)
        sizes = index_words(layout, self.heads, self.cache.stride(0))
        source = query.flatten(1).clone()
        operands = [
            step.ctypes.data, requests.ctypes.data, sizes.ctypes.data, source.data_ptr(),
            4 * source.stride(0), weights.data_ptr(), 4 * weights.stride(0), positions.ctypes.data,
            self.cache.data_ptr() + layout.index_offset, chosen.data_ptr(), self.top_k,
            scratch.data_ptr(), per_thread, self.rope_dim // 2, int(self.interleaved),
            cos.data_ptr(), sin.data_ptr(),
        ]  # fmt: skip
        program = KernelProgram(NUM_THREADS)
        program.record(CHOOSE_TOKENS[self.stored], operands)
        program.replay()
        return chosen

    def expected(
        self, query: torch.Tensor, weights: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> list[torch.Tensor]:
        counts, contexts = zip(*self.lengths, strict=True)
        starts, lens = torch.tensor([0, *counts]).cumsum(0), torch.tensor(contexts)
        return reference.choose_tokens(
            query, weights, self.plain, *tables(cos, sin), self.table, starts, lens, self.top_k,
            self.interleaved,
        )  # fmt: skip


def tables(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tables of `reference.rope`."""
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def row_of(layer: Layer, slot: int) -> torch.Tensor:
    """Returns the key in a slot of a cache in float32."""
    layout = layer.layout
    begin = slot % BLOCK_SIZE * layout.row_bytes
    row = layer.cache[slot // BLOCK_SIZE, begin : begin + layout.row_bytes]
    return row[layout.index_offset :].view(torch.float32)


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_largest_scores_are_chosen(interleaved: bool, stored: str) -> None:
    """Scores next to the last chosen one may be rounded past it, and no others."""
    for heads, dim, rope_dim, top_k in ((5, 32, 8, 16), (40, 128, 64, 20), (1, 20, 20, 1)):
        layer = Layer(MIXED, heads, dim, rope_dim, top_k, interleaved, stored)
        layer.store()
        tokens = sum(count for count, _ in MIXED)
        query, weights = torch.randn(tokens, heads, dim), torch.randn(tokens, heads)
        angles = layer.angles(tokens)
        found = layer.choose(query, weights, *angles)
        want = layer.expected(query, weights, *angles)
        num_same = 0
        for row, expected in zip(found, want, strict=True):
            slots = row[: len(expected)].tolist()
            assert (row[len(expected) :] == -7).all()
            assert len(set(slots)) == len(slots)
            num_same += len(set(slots) & set(expected.tolist()))
        assert num_same >= 0.99 * sum(map(len, want))


@pytest.mark.parametrize("top_k", [1, 16, 700])
def test_of_equal_scores_the_first_are_chosen(top_k: int) -> None:
    """The scores of whole numbers are exact."""
    layer = Layer(MIXED, 3, 20, 8, top_k, False, "float32")
    layer.store()
    # Keys of few whole numbers, in both caches.
    keys = torch.randint(-1, 2, (len(layer.slots), 20)).float()
    for key, slot in zip(keys, layer.slots.tolist(), strict=True):
        layer.plain[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = key
        row_of(layer, slot)[:20] = key
    tokens = sum(count for count, _ in MIXED)
    query = torch.randint(-1, 2, (tokens, 3, 20)).float()
    weights = torch.randint(-1, 3, (tokens, 3)).float()
    cos, sin = torch.ones(tokens, 4), torch.zeros(tokens, 4)
    found = layer.choose(query, weights, cos, sin)
    for row, expected in zip(found, layer.expected(query, weights, cos, sin), strict=True):
        assert torch.equal(row[: len(expected)].long(), expected)
