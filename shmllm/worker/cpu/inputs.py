"""A step's inputs, at fixed addresses: what recorded kernels read anew in every step."""

from __future__ import annotations

import numpy as np

from shmllm.worker.arrays import LongArray
from shmllm.worker.batch import StepInputs
from shmllm_kernels.cpu.attention import count_tiles

COUNTS = ("num_tokens", "num_requests", "num_samples")


class CpuInputs:
    """
    Args:
        max_tokens: of a step.
        max_requests: of a step.
        heads_per_kv: query heads that share a key-value head.

    Attributes:
        token_ids, positions, slot_mapping: (max_tokens,) int64, as in `StepInputs`. A negative
            token id: its embedding is there already.
        rows, first_tokens, counts, context_lens, sample_tokens: (max_requests,) int64, likewise.
        tiles: (max_requests + 1,) int64, see `count_tiles`.
    """

    def __init__(self, max_tokens: int, max_requests: int, heads_per_kv: int) -> None:
        self._heads_per_kv = heads_per_kv
        self._counts = np.zeros(len(COUNTS), np.int64)

        def take(size: int) -> LongArray:
            return np.zeros(size, np.int64)

        self.token_ids, self.positions = take(max_tokens), take(max_tokens)
        self.slot_mapping = take(max_tokens)
        self.rows, self.first_tokens = take(max_requests), take(max_requests)
        self.counts, self.context_lens = take(max_requests), take(max_requests)
        self.sample_tokens = take(max_requests)
        self.tiles = take(max_requests + 1)

    def address_of(self, count: str) -> int:
        """Where one of COUNTS lies."""
        return int(self._counts.ctypes.data) + 8 * COUNTS.index(count)

    def fill(self, inputs: StepInputs) -> None:
        """Take in a step."""
        num_tokens, num_requests = len(inputs.token_ids), len(inputs.rows)
        num_samples = len(inputs.sample_tokens)
        self._counts[:] = num_tokens, num_requests, num_samples
        self.token_ids[:num_tokens] = inputs.token_ids
        self.positions[:num_tokens] = inputs.positions
        self.slot_mapping[:num_tokens] = inputs.slot_mapping
        self.rows[:num_requests] = inputs.rows
        self.first_tokens[:num_requests] = inputs.first_tokens
        self.counts[:num_requests] = inputs.counts
        self.context_lens[:num_requests] = inputs.context_lens
        self.sample_tokens[:num_samples] = inputs.sample_tokens
        count_tiles(inputs.counts, self._heads_per_kv, self.tiles)
