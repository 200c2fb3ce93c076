"""Log-probability and rank of each row's token, and the best few tokens beside it.

A token's rank needs no sort, only a count; the best few come from the same short lists that
`sampling` makes, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from shmllm_kernels.gpu.candidates import CAPACITY, row_peak
from shmllm_kernels.gpu.chunks import first_of_largest, summarise
from shmllm_kernels.gpu.configs import next_power_of_two
from shmllm_kernels.gpu.sampling import CHOICE_BLOCK, SamplingScratch, make_short_lists

MAX_ALTERNATIVES = 256
"""For more of them a sort is faster."""


@triton.jit
def _rank(
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
    """Sums up a chunk, and counts what is better than the token."""
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
def _best(
    scores_ptr,
    ranks_ptr,
    top_scores_ptr,
    top_ids_ptr,
    logits_ptr,
    chunk_max_ptr,
    chunk_sum_ptr,
    better_ptr,
    short_ptr,
    short_ids_ptr,
    lengths_ptr,
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
    base = row_peak(chunk_max_ptr + index * num_chunks, num_chunks, CHUNKS)
    peaks = tl.load(chunk_max_ptr + parts, mask=present, other=float("-inf"))
    sums = tl.load(chunk_sum_ptr + parts, mask=present, other=0.0)
    total = tl.log(tl.sum(tl.where(sums > 0.0, sums * tl.exp(peaks - base), 0.0), axis=0))
    own = tl.load(row + tl.load(tokens_ptr + index))
    tl.store(scores_ptr + index, own - base - total if NORMALISES else own)
    better = tl.load(better_ptr + parts, mask=present, other=0)
    tl.store(ranks_ptr + index, tl.sum(better, axis=0) + 1)

    k = tl.minimum(k, vocab_size)
    length = tl.load(lengths_ptr + index)
    is_short = (k < vocab_size) & (length >= k)
    length = tl.where(is_short, length, vocab_size)
    values_ptr = row
    if is_short:
        values_ptr = short_ptr + index * CAPACITY
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
                short_ids_ptr + index * CAPACITY + places, mask=inside & is_short, other=0
            )
            ids = tl.where(is_short, ids, places)
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
    """What `score` writes, for at most N rows and K alternatives.

    Attributes:
        tokens: (N,) float32, of the tokens themselves.
        ranks: (N,) int32, theirs, from 1.
        top: (N, K) float32, best first, as many as the row asks for.
        top_ids: (N, K) int32, which tokens these are.
        filters: temperature, top_p and min_p of the short lists, (N,) each.
        rows: (N,) int32, scratch.
    """

    tokens: Tensor
    ranks: Tensor
    top: Tensor
    top_ids: Tensor
    filters: tuple[Tensor, Tensor, Tensor]
    rows: Tensor

    @classmethod
    def allocate(cls, num_rows: int, k: int, device: torch.device | str) -> Scores:
        """num_rows * (8 * k + 24) bytes."""

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
    """Writes what ``reference.sampling.score`` returns, of the rows that ask.

    Args:
        out: for at least N rows. What a row does not ask for stays as it is.
        logits: (N, V) float32, rows contiguous. Not changed.
        tokens: (N,) int64, contiguous.
        ks: (N,) int32, alternatives of each, at most those of ``out``; -1: does not ask.
        scratch: for at least N rows of V entries; what `sample` left there is overwritten.
        normalise: log-probabilities; False takes the logits as they are.

    Reads a row three times, and the short list once for each alternative.
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
    _rank[grid](logits, *parts, *asked, out.rows, stride, *sizes, CHUNK=scratch.chunk, num_warps=8)
    temperature, top_p, min_p = out.filters
    make_short_lists(logits, out.rows, (temperature, ks, top_p, min_p), scratch, num_rows)
    _best[(num_rows,)](
        out.tokens,
        out.ranks,
        out.top,
        out.top_ids,
        logits,
        *parts,
        scratch.short,
        scratch.short_ids,
        scratch.lengths,
        *asked,
        stride,
        out.top.stride(0),
        *sizes,
        NORMALISES=normalise,
        CHUNKS=next_power_of_two(num_chunks),
        BLOCK=CHOICE_BLOCK,
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
    assert scratch.edited.shape[0] >= num_rows, "scratch is for fewer rows"
    assert scratch.edited.shape[1] == vocab_size, "scratch is for another vocabulary"
