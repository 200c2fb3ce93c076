"""CPU indexers of attention of heads: the blocks that they choose are those of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.kernel_helpers import poisoned

from shmllm_kernels.cpu import KernelProgram
from shmllm_kernels.cpu.attention_pieces import request_words
from shmllm_kernels.cpu.block_indexer import CHOOSE_BLOCKS, scratch_bytes
from shmllm_kernels.cpu.cache_layout import DTYPES, CacheLayout, head_words
from shmllm_kernels.cpu.heads import STORE_HEADS
from shmllm_kernels.reference import indexer as reference

LENGTHS = ((1, 21), (5, 5), (1, 1), (19, 300), (1, 700))
"""For each request the tokens in the step, and the context length."""
NUM_THREADS = 2


class Layer:
    """A layer's cache, in which the index keys of some requests' tokens are stored.

    Args:
        heads, dim, size, top_k, num_local: those of the indexer.
        block_size: the tokens of a block of the cache.
        stored: the dtype name of the cache.
        draw: draws keys of a shape.
    """

    def __init__(self, heads, dim, size, top_k, num_local, block_size, stored, draw) -> None:
        self.numbers = size, top_k, num_local
        self.heads, self.dim, self.block_size, self.stored = heads, dim, block_size, stored
        self.layout = CacheLayout(2, 8, block_size, stored, index_dim=dim)
        blocks = [-(-context // block_size) for _, context in LENGTHS]
        order = torch.randperm(sum(blocks) + 3).int()
        self.table = torch.full((len(LENGTHS), max(blocks)), 2**30, dtype=torch.int32)
        self.cache = torch.full((len(order), self.layout.block_bytes + 64), 0xFF, dtype=torch.uint8)
        dtype = getattr(torch, stored)
        self.plain = poisoned(len(order), block_size, dim, dtype=dtype, device="cpu")
        rows = zip(order[: sum(blocks)].split(blocks), LENGTHS, strict=True)
        for row, (ids, (_, context)) in enumerate(rows):
            self.table[row, : len(ids)] = ids
            positions = torch.arange(context)
            places = ids.long()[positions // block_size], positions % block_size
            keys = draw(context, dim)
            self.plain[places] = keys.to(dtype)
            self._store(keys, places[0] * block_size + places[1])

    @property
    def words(self):
        return head_words(self.layout.index, self.heads, 1.0, self.cache.stride(0))

    @property
    def first_key(self) -> int:
        return self.cache.data_ptr() + self.layout.index_offset

    def _store(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        rows = torch.cat([torch.zeros(len(keys), self.heads * self.dim), keys], 1)
        count, words, program = np.array([len(rows)]), self.words, KernelProgram(NUM_THREADS)
        operands = [
            count.ctypes.data, words.ctypes.data, rows.data_ptr(), 4 * rows.stride(0), 0, 0,
            slots.data_ptr(), self.first_key, *[0] * 10,
        ]  # fmt: skip
        program.record(STORE_HEADS[self.stored, self.stored], operands)
        program.replay()

    def choose(self, query: torch.Tensor) -> torch.Tensor:
        """Returns entries, [tokens, heads, top_k * entries of a block]; -7: none."""
        counts, contexts = (np.array(each) for each in zip(*LENGTHS, strict=True))
        firsts, rows = np.cumsum(counts) - counts, np.arange(len(counts))
        ends = zip(contexts - counts, contexts, strict=True)
        positions = np.concatenate([np.arange(*each) for each in ends])
        step, words, table = np.array([len(query), len(counts)]), self.words, self.table
        requests = request_words(
            firsts.ctypes.data, 0, 0, rows.ctypes.data, table.data_ptr(), table.shape[1], 0, 0
        )
        size, top_k, num_local = self.numbers
        shape = len(query), self.heads, top_k * (size // self.block_size)
        chosen = torch.full(shape, -7, dtype=torch.int32)
        per_thread = scratch_bytes(self.layout.index, self.heads, table.shape[1])
        scratch = torch.full((NUM_THREADS, per_thread), 0xFF, dtype=torch.uint8)
        operands = [
            step.ctypes.data, requests.ctypes.data, words.ctypes.data, query.data_ptr(),
            4 * query.stride(0), positions.ctypes.data, self.first_key, chosen.data_ptr(),
            top_k, size, num_local, scratch.data_ptr(), per_thread,
        ]  # fmt: skip
        program = KernelProgram(NUM_THREADS)
        program.record(CHOOSE_BLOCKS[self.stored], operands)
        program.replay()
        return chosen

    def check(self, query: torch.Tensor) -> None:
        counts, contexts = zip(*LENGTHS, strict=True)
        starts, lens = torch.tensor([0, *counts]).cumsum(0), torch.tensor(contexts)
        want = reference.choose_blocks(query, self.plain, self.table, starts, lens, *self.numbers)
        for row, expected in zip(self.choose(query), want, strict=True):
            width = expected.shape[1]
            assert torch.equal(row[:, :width].long(), expected)
            assert (row[:, width:] == -7).all(), "it wrote more than it chose"


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize(
    ("heads", "size", "top_k", "num_local", "block_size"),
    [(4, 32, 3, 1, 16), (1, 8, 1, 1, 4), (7, 128, 2, 2, 32), (2, 16, 9, 1, 16)],
)
def test_blocks_with_the_largest_scores_are_chosen(
    heads: int, size: int, top_k: int, num_local: int, block_size: int, stored: str
) -> None:
    layer = Layer(heads, 20, size, top_k, num_local, block_size, stored, torch.randn)
    layer.check(torch.randn(sum(count for count, _ in LENGTHS), heads, 20))


def test_of_equal_scores_the_first_are_chosen() -> None:
    """The scores of whole numbers are exact."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape).float()

    layer = Layer(3, 4, 16, 4, 2, 8, "float32", draw)
    layer.check(draw(sum(count for count, _ in LENGTHS), 3, 4))
