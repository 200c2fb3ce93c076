"""Launches the sampler, which samples the next token of each row.

It takes two launches, or four if a row has filters. `chunk_summaries` applies masks and penalties
and reduces each chunk of a row, `top_candidates` lists the candidates of rows with filters, and
`token_choice` chooses the token. Rows are independent and sums have a fixed order: a row's token
depends on its logits, its parameters, its seed and its position alone.

The logits of greedy and unfiltered rows are read once. Those of a filtered row are also written
once and read twice more: 20 bytes for each entry in all, and about 100 flops, half of them for the
counts at 16 distances.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from shmllm_kernels.gpu.chunk_summaries import summarise_chunks
from shmllm_kernels.gpu.configs import next_power_of_two, sampling_chunk
from shmllm_kernels.gpu.token_choice import choose_tokens, mask_dropped
from shmllm_kernels.gpu.top_candidates import (
    CAPACITY,
    NUM_PIVOTS,
    collect_candidates,
    count_by_distance,
)
from shmllm_kernels.reference.sampling import SamplingColumns

COUNT_BLOCK = 256
CHOOSE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Masks of the allowed tokens, for some rows.

    Attributes:
        words: (M, ceil(V / 32)) int32, bit t % 32 of word t // 32 allows token t.
        rows: (N,) int32, the index of each row's mask among the M masks; -1: no mask.
    """

    words: Tensor
    rows: Tensor


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
        num_candidates: (N,) int32, the number of candidates; -1: more than 2048, no list.
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
    thresholds: Tensor
    last_ids: Tensor

    @classmethod
    def allocate(
        cls, num_rows: int, vocab_size: int, device: torch.device | str, chunk: int | None = None
    ) -> SamplingScratch:
        """Allocates about num_rows * (4 * vocab_size + 20,000) bytes."""
        chunk = chunk or sampling_chunk(vocab_size)
        num_chunks = triton.cdiv(vocab_size, chunk)

        def floats(*shape: int) -> Tensor:
            return torch.empty((num_rows, *shape), dtype=torch.float32, device=device)

        def ints(*shape: int) -> Tensor:
            return torch.empty((num_rows, *shape), dtype=torch.int32, device=device)

        by_chunk = floats(num_chunks), floats(num_chunks), floats(num_chunks), ints(num_chunks)
        pivots = ints(num_chunks, NUM_PIVOTS), floats(num_chunks, NUM_PIVOTS)
        by_row = floats(CAPACITY), ints(CAPACITY), ints(), floats(), ints()
        return cls(chunk, floats(vocab_size), *by_chunk, *pivots, *by_row)


def sample(
    tokens: Tensor,
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    columns: SamplingColumns,
    scratch: SamplingScratch,
    token_counts: Tensor | None = None,
    masks: TokenMasks | None = None,
    keeps_processed: bool = False,
    has_filters: bool = True,
    last_tokens: Tensor | None = None,
) -> None:
    """Applies masks and ``reference.sampling.penalise``, then samples as
    ``reference.sampling.sample``.

    Args:
        tokens: (N,) int64, contiguous; gets the tokens. Entries whose ``rows`` is -1 stay
            unchanged.
        logits: (N, V), rows contiguous: float32, float16 or bfloat16. Not changed, unless it is
            the beginning of ``scratch.processed_logits``.
        rows: (N,) int32, the index of each row in ``columns`` and ``token_counts``; -1: padding.
        positions: (N,) int64, the position of each token that is sampled.
        columns: the sampling parameters of all R rows.
        scratch: memory for at least N rows of V entries.
        token_counts: (R, V) int32, see `logits_processors`; None if no row has penalties.
        masks: the allowed tokens; None: all.
        keeps_processed: whether ``scratch.processed_logits`` gets the processed logits of all
            rows.
        has_filters: whether any row that is not greedy has top_k, top_p or min_p.
        last_tokens: (R,) int64; gets each row's token, too.
    """
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, scratch.chunk)
    _check(tokens, logits, rows, positions, columns, scratch, token_counts, masks)
    assert last_tokens is None or last_tokens.dtype is torch.int64, "last_tokens are int64"
    assert last_tokens is None or last_tokens.is_contiguous(), "last_tokens must be contiguous"
    if num_rows == 0:
        return
    grid = (num_rows, num_chunks)
    filters = (columns.temperature, columns.top_k, columns.top_p, columns.min_p)
    summarise_chunks[grid](
        logits,
        scratch.processed_logits,
        scratch.chunk_max,
        scratch.chunk_sum,
        scratch.chunk_best,
        scratch.chunk_id,
        rows,
        positions,
        *filters,
        columns.seeds,
        columns.repetition,
        columns.frequency,
        columns.presence,
        rows if token_counts is None else token_counts,
        rows if masks is None else masks.words,
        rows if masks is None else masks.rows,
        logits.stride(0),
        vocab_size,
        0 if token_counts is None else token_counts.stride(0),
        0 if masks is None else masks.words.stride(0),
        vocab_size,
        num_chunks,
        HAS_COUNTS=token_counts is not None,
        HAS_MASK=masks is not None,
        KEEPS_ALL=keeps_processed,
        CHUNK=scratch.chunk,
        num_warps=8,
    )
    if has_filters:
        list_candidates(scratch.processed_logits, rows, filters, scratch, num_rows)
    choose_tokens[(num_rows,)](
        tokens,
        tokens if last_tokens is None else last_tokens,
        scratch.processed_logits,
        scratch.chunk_max,
        scratch.chunk_sum,
        scratch.chunk_best,
        scratch.chunk_id,
        scratch.candidates,
        scratch.candidate_ids,
        scratch.num_candidates,
        scratch.thresholds,
        scratch.last_ids,
        rows,
        positions,
        *filters,
        columns.seeds,
        vocab_size,
        vocab_size,
        num_chunks,
        HAS_LAST=last_tokens is not None,
        CHUNKS=next_power_of_two(num_chunks),
        BLOCK=CHOOSE_BLOCK,
        CAPACITY=CAPACITY,
        num_warps=8,
    )
    if keeps_processed:
        kept = (scratch.processed_logits, scratch.thresholds, scratch.last_ids, rows)
        mask_dropped[grid](*kept, vocab_size, vocab_size, CHUNK=scratch.chunk, num_warps=8)


def list_candidates(
    values: Tensor,
    rows: Tensor,
    filters: tuple[Tensor, Tensor, Tensor, Tensor],
    scratch: SamplingScratch,
    num_rows: int,
) -> None:
    """Lists the entries of each row that its filters may keep.

    Args:
        values: (N, V) float32, rows contiguous.
        rows: (N,) int32, the index of each row in ``filters``; -1: padding.
        filters: temperature, top_k, top_p and min_p, (R,) each.
        scratch: ``chunk_max`` is read; ``candidates``, ``candidate_ids`` and ``num_candidates``
            are written.
        num_rows: N.
    """
    vocab_size = values.shape[1]
    num_chunks = triton.cdiv(vocab_size, scratch.chunk)
    parts = (scratch.counts, scratch.masses)
    sizes = (values.stride(0), vocab_size, num_chunks)
    options = {
        "CHUNK": scratch.chunk,
        "CHUNKS": next_power_of_two(num_chunks),
        "BLOCK": COUNT_BLOCK,
        "NUM_PIVOTS": NUM_PIVOTS,
        "num_warps": 4,
    }
    grid = (num_rows, num_chunks)
    count_by_distance[grid](values, scratch.chunk_max, *parts, rows, *filters, *sizes, **options)
    lists = (scratch.candidates, scratch.candidate_ids, scratch.num_candidates)
    collect_candidates[grid](
        values,
        scratch.chunk_max,
        *parts,
        *lists,
        rows,
        *filters,
        *sizes,
        CAPACITY=CAPACITY,
        **options,
    )


def _check(
    tokens: Tensor,
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    columns: SamplingColumns,
    scratch: SamplingScratch,
    token_counts: Tensor | None,
    masks: TokenMasks | None,
) -> None:
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, "rows of logits must be contiguous"
    for tensor, dtype in ((tokens, torch.int64), (rows, torch.int32), (positions, torch.int64)):
        assert tensor.shape == (num_rows,), "tokens, rows and positions: one for each row"
        assert tensor.dtype is dtype, "tokens and positions are int64, rows int32"
        assert tensor.is_contiguous(), "tokens, rows and positions must be contiguous"
    for name in SamplingColumns.__slots__:
        column = getattr(columns, name)
        wanted = {"top_k": torch.int32, "seeds": torch.int64}.get(name, torch.float32)
        assert column.dtype is wanted, f"{name} must be {wanted}"
        assert column.is_contiguous(), f"{name} must be contiguous"
    assert scratch.processed_logits.shape[0] >= num_rows, "scratch is for fewer rows"
    assert scratch.processed_logits.shape[1] == vocab_size, "scratch is for another vocabulary"
    assert scratch.chunk % COUNT_BLOCK == 0, f"chunks must be multiples of {COUNT_BLOCK}"
    if token_counts is not None:
        assert token_counts.dtype is torch.int32, "token_counts are int32"
        assert token_counts.shape[1] == vocab_size, "token_counts are for another vocabulary"
        assert token_counts.stride(1) == 1, "rows of token_counts must be contiguous"
    if masks is not None:
        assert masks.words.dtype is torch.int32, "words are int32"
        assert masks.words.shape[1] * 32 >= vocab_size, "masks are for fewer tokens"
        assert masks.words.stride(1) == 1, "rows of words must be contiguous"
        assert masks.rows.dtype is torch.int32, "rows of masks are int32"
        assert masks.rows.shape == (num_rows,), "rows of masks: one for each row"
