"""Computes the log-probability and rank of each row's token, and the row's most likely tokens.

A rank needs a count instead of a sort. The most likely tokens are found one after the other, in the
same list of candidates that `sampling` makes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.chunk_summaries import first_of_largest, summarise
from shmllm_kernels.gpu.configs import next_power_of_two
from shmllm_kernels.gpu.sampling import CHOOSE_BLOCK, SamplingScratch, list_candidates
from shmllm_kernels.gpu.top_candidates import CAPACITY, row_peak, row_total

MAX_ALTERNATIVES = 256
"""The largest number of alternatives of one row; for more of them a sort is faster."""


@triton.jit
def _rank_chunks(
    logits_ptr,
    chunk_max_ptr,
    chunk_sum_ptr,
    better_ptr,
    tokens_ptr,
    ks_ptr,
    rows_ptr,
    logits_stride,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
):
    """Reduces a chunk, and counts the entries that are larger than the token's."""
    index = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    asks = tl.load(ks_ptr + index) >= 0
    if chunk == 0:
        tl.store(rows_ptr + index, tl.where(asks, index, -1).to(tl.int32))
    if not asks:
        return
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    row = logits_ptr + index * logits_stride
    values = tl.load(row + columns, mask=columns < vocab_size, other=float("-inf"))
    own = tl.load(row + tl.load(tokens_ptr + index))
    peak, total = summarise(values)
    part = index * num_chunks + chunk
    tl.store(chunk_max_ptr + part, peak)
    tl.store(chunk_sum_ptr + part, total)
    tl.store(better_ptr + part, tl.sum((values > own).to(tl.int32), axis=0))


@triton.jit
def _top_scores(
    scores_ptr,
    ranks_ptr,
    top_scores_ptr,
    top_ids_ptr,
    logits_ptr,
    chunk_max_ptr,
    chunk_sum_ptr,
    better_ptr,
    candidates_ptr,
    candidate_ids_ptr,
    num_candidates_ptr,
    tokens_ptr,
    ks_ptr,
    logits_stride,
    top_stride,
    vocab_size,
    num_chunks,
    NORMALISES: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    k = tl.load(ks_ptr + index)
    if k < 0:
        return
    chunks = tl.arange(0, CHUNKS)
    parts = index * num_chunks + chunks
    present = chunks < num_chunks
    row = logits_ptr + index * logits_stride
    chunk_max_ptr += index * num_chunks
    chunk_sum_ptr += index * num_chunks
    base = row_peak(chunk_max_ptr, num_chunks, CHUNKS)
    total = tl.log(row_total(chunk_max_ptr, chunk_sum_ptr, base, num_chunks, CHUNKS))
    own = tl.load(row + tl.load(tokens_ptr + index))
    tl.store(scores_ptr + index, own - base - total if NORMALISES else own)
    better = tl.load(better_ptr + parts, mask=present, other=0)
    tl.store(ranks_ptr + index, tl.sum(better, axis=0) + 1)

    k = tl.minimum(k, vocab_size)
    length = tl.load(num_candidates_ptr + index)
    is_list = (k < vocab_size) & (length >= k)
    length = tl.where(is_list, length, vocab_size)
    values_ptr = row
    if is_list:
        values_ptr = candidates_ptr + index * CAPACITY
    last = float("inf")
    last_id = -1
    for place in range(0, k):
        best = float("-inf")
        best_id = vocab_size
        for begin in range(0, length, BLOCK):
            places = begin + tl.arange(0, BLOCK)
            inside = places < length
            values = tl.load(values_ptr + places, mask=inside, other=float("-inf"))
            ids = tl.load(
                candidate_ids_ptr + index * CAPACITY + places, mask=inside & is_list, other=0
            )
            ids = tl.where(is_list, ids, places)
            follows = inside & ((values < last) | ((values == last) & (ids > last_id)))
            rest = tl.where(follows, values, float("-inf"))
            largest, largest_id = first_of_largest(
                rest, tl.where(follows, ids, vocab_size), vocab_size
            )
            is_better = (largest > best) | ((largest == best) & (largest_id < best_id))
            best = tl.where(is_better, largest, best)
            best_id = tl.where(is_better, largest_id, best_id)
        top = best - base - total if NORMALISES else best
        tl.store(top_scores_ptr + index * top_stride + place, top)
        tl.store(top_ids_ptr + index * top_stride + place, best_id)
        last = best
        last_id = best_id


@dataclass(frozen=True, slots=True)
class Scores:
    """The results of `score`, for at most N rows and K alternatives.

    Attributes:
        tokens: (N,) float32, the scores of the given tokens.
        ranks: (N,) int32, their ranks, from 1.
        top: (N, K) float32, the scores of the alternatives, best first, as many as the row's k.
        top_ids: (N, K) int32, the alternatives' token ids.
        filters: temperature, top_p and min_p for the list of candidates, (N,) each: constants.
        rows: (N,) int32, scratch memory.
    """

    tokens: Tensor
    ranks: Tensor
    top: Tensor
    top_ids: Tensor
    filters: tuple[Tensor, Tensor, Tensor]
    rows: Tensor

    @classmethod
    def allocate(cls, num_rows: int, k: int, device: torch.device | str) -> Scores:
        """Allocates num_rows * (8 * k + 24) bytes."""

        def floats(value: float, *shape: int) -> Tensor:
            return torch.full((num_rows, *shape), value, dtype=torch.float32, device=device)

        def ints(*shape: int) -> Tensor:
            return torch.zeros((num_rows, *shape), dtype=torch.int32, device=device)

        filters = floats(1.0), floats(1.0), floats(0.0)
        return cls(floats(0.0), ints(), floats(0.0, k), ints(k), filters, ints())


def score(
    out: Scores,
    logits: Tensor,
    tokens: Tensor,
    ks: Tensor,
    scratch: SamplingScratch,
    normalise: bool = True,
) -> None:
    """Writes the results of ``reference.sampling.score`` to ``out``.

    Args:
        out: results for at least N rows. Rows with k = -1, and alternatives after a row's k, stay
            unchanged.
        logits: (N, V) float32, rows contiguous. Not changed.
        tokens: (N,) int64, contiguous.
        ks: (N,) int32, the number of alternatives of each row, at most that of ``out``; -1: the
            row is skipped.
        scratch: memory for at least N rows of V entries; the results of `sample` in it are
            overwritten.
        normalise: whether scores are log-probabilities; otherwise they are the logits.

    Reads a row three times, and the list of candidates once for each alternative.
    """
    num_rows, vocab_size = logits.shape
    _check(out, logits, tokens, ks, scratch)
    if num_rows == 0:
        return
    num_chunks = triton.cdiv(vocab_size, scratch.chunk)
    sizes = (vocab_size, num_chunks)
    parts = (scratch.chunk_max, scratch.chunk_sum, scratch.chunk_id)
    grid = (num_rows, num_chunks)
    asked = (tokens, ks)
    stride = logits.stride(0)
    _rank_chunks[grid](
        logits, *parts, *asked, out.rows, stride, *sizes, CHUNK=scratch.chunk, num_warps=8
    )
    temperature, top_p, min_p = out.filters
    list_candidates(logits, out.rows, (temperature, ks, top_p, min_p), scratch, num_rows)
    _top_scores[(num_rows,)](
        out.tokens,
        out.ranks,
        out.top,
        out.top_ids,
        logits,
        *parts,
        scratch.candidates,
        scratch.candidate_ids,
        scratch.num_candidates,
        *asked,
        stride,
        out.top.stride(0),
        *sizes,
        NORMALISES=normalise,
        CHUNKS=next_power_of_two(num_chunks),
        BLOCK=CHOOSE_BLOCK,
        CAPACITY=CAPACITY,
        num_warps=4,
    )


def _check(
    out: Scores, logits: Tensor, tokens: Tensor, ks: Tensor, scratch: SamplingScratch
) -> None:
    num_rows, vocab_size = logits.shape
    assert logits.dtype is torch.float32, "logits are float32"
    assert logits.stride(1) == 1, "rows of logits must be contiguous"
    assert tokens.shape == ks.shape == (num_rows,), "one token and one k for each row"
    assert tokens.dtype is torch.int64, "tokens are int64"
    assert ks.dtype is torch.int32, "ks are int32"
    assert out.ranks.shape[0] >= num_rows, "out is for fewer rows"
    assert out.top.shape[1] <= MAX_ALTERNATIVES, f"at most {MAX_ALTERNATIVES} alternatives"
    assert scratch.processed_logits.shape[0] >= num_rows, "scratch is for fewer rows"
    assert scratch.processed_logits.shape[1] == vocab_size, "scratch is for another vocabulary"
