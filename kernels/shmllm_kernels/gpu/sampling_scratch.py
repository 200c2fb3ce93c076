"""The memory of the sampler's kernels between the launches of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from shmllm_kernels.gpu.configs import sampling_chunk
from shmllm_kernels.gpu.threshold_search import NUM_TABLES, STATE_SIZE, TABLE_SIZE
from shmllm_kernels.gpu.top_candidates import CAPACITY, NUM_PIVOTS


@dataclass(frozen=True, slots=True)
class SamplingScratch:
    """Memory for the intermediate results of one step's launches, for at most N rows.

    Attributes:
        chunk: the number of a row's entries in one program.
        processed_logits: (N, V) float32, the logits of filtered rows after masks, penalties and
            temperature. With ``keeps_processed`` those of all rows, after the filters too.
        chunk_max: (N, C) float32, the largest entry of each of C chunks.
        chunk_sum: (N, C) float32, the sum of exp(entry - chunk_max) over the chunk.
        chunk_best: (N, C) float32, the largest entry after adding noise.
        chunk_id: (N, C) int32, the token of ``chunk_best``.
        counts: (N, C, 16) int32, the number of entries within each distance of the row's maximum.
        masses: (N, C, 16) float32, the sums of their weights.
        candidates: (N, 2048) float32, the entries that the filters may keep.
        candidate_ids: (N, 2048) int32, their tokens, in increasing order.
        num_candidates: (N,) int32, the number of candidates; 0: no filters; -1: more than 2048, no
            list.
        tables: (3, N, 2050) int64, and
        states: (2, N, 8) int64, see `threshold_search`; a launch uses them in turns.
        tied_best: (N, C) float32, like ``chunk_best``, of a row without list; it counts the entries
            equal to the threshold, and ``chunk_best`` does not.
        tied_id: (N, C) int32, the token of ``tied_best``.
        num_tied: (N, C) int32, the number of entries equal to the threshold.
        kept_ties: (N,) int32, how many of these a row without list keeps.
        thresholds: (N,) float32, the smallest entry that is kept.
        last_ids: (N,) int32, the last token that is kept among entries equal to the threshold.
    """

    chunk: int
    processed_logits: Tensor
    chunk_max: Tensor
    chunk_sum: Tensor
    chunk_best: Tensor
    chunk_id: Tensor
    counts: Tensor
    masses: Tensor
    candidates: Tensor
    candidate_ids: Tensor
    num_candidates: Tensor
    tables: Tensor
    states: Tensor
    tied_best: Tensor
    tied_id: Tensor
    num_tied: Tensor
    kept_ties: Tensor
    thresholds: Tensor
    last_ids: Tensor

    @classmethod
    def allocate(
        cls, num_rows: int, vocab_size: int, device: torch.device | str, chunk: int | None = None
    ) -> SamplingScratch:
        """Allocates about num_rows * (4 * vocab_size + 71,000) bytes."""
        chunk = chunk or sampling_chunk(vocab_size)
        num_chunks = triton.cdiv(vocab_size, chunk)

        def floats(*shape: int) -> Tensor:
            return torch.empty((num_rows, *shape), dtype=torch.float32, device=device)

        def ints(*shape: int) -> Tensor:
            return torch.empty((num_rows, *shape), dtype=torch.int32, device=device)

        def longs(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int64, device=device)

        by_chunk = floats(num_chunks), floats(num_chunks), floats(num_chunks), ints(num_chunks)
        pivots = ints(num_chunks, NUM_PIVOTS), floats(num_chunks, NUM_PIVOTS)
        lists = floats(CAPACITY), ints(CAPACITY), ints()
        search = longs(NUM_TABLES, num_rows, TABLE_SIZE.value), longs(2, num_rows, STATE_SIZE.value)
        tied = floats(num_chunks), ints(num_chunks), ints(num_chunks), ints()
        bounds = floats(), ints()
        return cls(chunk, floats(vocab_size), *by_chunk, *pivots, *lists, *search, *tied, *bounds)
