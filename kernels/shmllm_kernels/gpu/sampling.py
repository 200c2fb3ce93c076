"""Samples the next token of each row: four launches, and two if no row has filters.

`chunks` edits the logits and finishes the rows without filters, `candidates` makes short lists
of the others, `choice` decides. Rows are treated each on its own, with sums in a fixed order:
a row's token depends on its logits, its parameters, its seed and its position alone.

Greedy and unfiltered rows read their logits once and write a few numbers. A filtered one is
written and read twice more: 20 bytes an entry in all, and about 100 flops, half of them for
the counts at 16 distances.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from shmllm_kernels.gpu.candidates import CAPACITY, NUM_PIVOTS, collect, count_within
from shmllm_kernels.gpu.choice import choose, forbid
from shmllm_kernels.gpu.chunks import look
from shmllm_kernels.gpu.configs import next_power_of_two, sampling_chunk
from shmllm_kernels.reference.sampling import SamplingColumns

COUNT_BLOCK = 256
CHOICE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens some rows may have at all.

    Attributes:
        words: (M, ceil(V / 32)) int32, bit t % 32 of word t // 32 allows token t.
        rows: (N,) int32, which of the M masks is that of each row of the logits; -1 for none.
    """

    words: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class SamplingScratch:
    """What the launches of one step leave for each other, for at most N rows.

    Attributes:
        chunk: entries of a row that one program takes.
        edited: (N, V) float32, logits after edits and temperature, of filtered rows; of all
            rows, and filtered, with ``keeps_processed``.
        chunk_max: (N, C) float32, the largest entry of each of C chunks.
        chunk_sum: (N, C) float32, sum of exponentials relative to it.
        chunk_best: (N, C) float32, the largest entry with noise.
        chunk_id: (N, C) int32, where that is.
        counts: (N, C, 16) int32, entries within each distance of the row's maximum.
        masses: (N, C, 16) float32, the sums of their weights.
        short: (N, 2048) float32, the entries that can matter.
        short_ids: (N, 2048) int32, which these are, in order.
        lengths: (N,) int32, how many; -1 for more.
        thresholds: (N,) float32, the smallest entry that is kept.
        last_ids: (N,) int32, the last kept of those equal to it.
    """

    chunk: int
    edited: Tensor
    chunk_max: Tensor
    chunk_sum: Tensor
    chunk_best: Tensor
    chunk_id: Tensor
    counts: Tensor
    masses: Tensor
    short: Tensor
    short_ids: Tensor
    lengths: Tensor
    thresholds: Tensor
    last_ids: Tensor

    @classmethod
    def allocate(
        cls, num_rows: int, vocab_size: int, device: torch.device | str, chunk: int | None = None
    ) -> SamplingScratch:
        """About num_rows * (4 * vocab_size + 20,000) bytes."""
        chunk = chunk or sampling_chunk(vocab_size)
        num_chunks = triton.cdiv(vocab_size, chunk)

        def floats(*shape: int) -> Tensor:
            return torch.empty((num_rows, *shape), dtype=torch.float32, device=device)

        def ints(*shape: int) -> Tensor:
            return torch.empty((num_rows, *shape), dtype=torch.int32, device=device)

        by_chunk = floats(num_chunks), floats(num_chunks), floats(num_chunks), ints(num_chunks)
        pivots = ints(num_chunks, NUM_PIVOTS), floats(num_chunks, NUM_PIVOTS)
        short = floats(CAPACITY), ints(CAPACITY), ints(), floats(), ints()
        return cls(chunk, floats(vocab_size), *by_chunk, *pivots, *short)


def sample(
    tokens: Tensor,
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    columns: SamplingColumns,
    scratch: SamplingScratch,
    uses: Tensor | None = None,
    masks: TokenMasks | None = None,
    keeps_processed: bool = False,
    has_filters: bool = True,
    last_tokens: Tensor | None = None,
) -> None:
    """Writes what ``reference.sampling.sample`` returns, after its ``penalise`` and the masks.

    Args:
        tokens: (N,) int64, contiguous; where ``rows`` is -1 it stays as it is.
        logits: (N, V), rows contiguous: float32, float16 or bfloat16. Not changed, but where
            it is the beginning of ``scratch.edited``.
        rows: (N,) int32, which row of ``columns`` and ``uses`` each is; -1 for none.
        positions: (N,) int64, the position that each token will have.
        columns: parameters of all rows.
        scratch: for at least N rows of V entries.
        uses: (R, V) int32, see `edits`; None where no row has penalties.
        masks: which tokens are allowed; None: all.
        keeps_processed: leave the logits that are drawn from in ``scratch.edited``.
        has_filters: whether any of the rows is drawn with top_k, top_p or min_p.
        last_tokens: (R,) int64, gets each row's token as well.
    """
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, scratch.chunk)
    _check(tokens, logits, rows, positions, columns, scratch, uses, masks)
    assert last_tokens is None or last_tokens.dtype is torch.int64, "last_tokens are int64"
    assert last_tokens is None or last_tokens.is_contiguous(), "last_tokens must be contiguous"
    if num_rows == 0:
        return
    grid = (num_rows, num_chunks)
    filters = (columns.temperature, columns.top_k, columns.top_p, columns.min_p)
    look[grid](
        logits,
        scratch.edited,
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
        rows if uses is None else uses,
        rows if masks is None else masks.words,
        rows if masks is None else masks.rows,
        logits.stride(0),
        vocab_size,
        0 if uses is None else uses.stride(0),
        0 if masks is None else masks.words.stride(0),
        vocab_size,
        num_chunks,
        HAS_USES=uses is not None,
        HAS_MASK=masks is not None,
        KEEPS_ALL=keeps_processed,
        CHUNK=scratch.chunk,
        num_warps=8,
    )
    if has_filters:
        make_short_lists(scratch.edited, rows, filters, scratch, num_rows)
    choose[(num_rows,)](
        tokens,
        tokens if last_tokens is None else last_tokens,
        scratch.edited,
        scratch.chunk_max,
        scratch.chunk_sum,
        scratch.chunk_best,
        scratch.chunk_id,
        scratch.short,
        scratch.short_ids,
        scratch.lengths,
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
        BLOCK=CHOICE_BLOCK,
        CAPACITY=CAPACITY,
        num_warps=8,
    )
    if keeps_processed:
        kept = (scratch.edited, scratch.thresholds, scratch.last_ids, rows)
        forbid[grid](*kept, vocab_size, vocab_size, CHUNK=scratch.chunk, num_warps=8)


def make_short_lists(
    values: Tensor,
    rows: Tensor,
    filters: tuple[Tensor, Tensor, Tensor, Tensor],
    scratch: SamplingScratch,
    num_rows: int,
) -> None:
    """Lists what the filters can leave of each row, with the chunks' maxima in the scratch.

    Args:
        values: (N, V) float32, rows contiguous.
        rows: (N,) int32, which row of ``filters`` each is; -1 for none.
        filters: temperature, top_k, top_p and min_p, (R,) each.
        scratch: ``chunk_max`` is read; ``short``, ``short_ids`` and ``lengths`` are written.
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
    count_within[grid](values, scratch.chunk_max, *parts, rows, *filters, *sizes, **options)
    lists = (scratch.short, scratch.short_ids, scratch.lengths)
    collect[grid](
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
    uses: Tensor | None,
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
    assert scratch.edited.shape[0] >= num_rows, "scratch is for fewer rows"
    assert scratch.edited.shape[1] == vocab_size, "scratch is for another vocabulary"
    assert scratch.chunk % COUNT_BLOCK == 0, f"chunks must be multiples of {COUNT_BLOCK}"
    if uses is not None:
        assert uses.dtype is torch.int32, "uses are int32"
        assert uses.shape[1] == vocab_size, "uses are for another vocabulary"
        assert uses.stride(1) == 1, "rows of uses must be contiguous"
    if masks is not None:
        assert masks.words.dtype is torch.int32, "words are int32"
        assert masks.words.shape[1] * 32 >= vocab_size, "masks are for fewer tokens"
        assert masks.words.stride(1) == 1, "rows of words must be contiguous"
        assert masks.rows.dtype is torch.int32, "rows of masks are int32"
        assert masks.rows.shape == (num_rows,), "rows of masks: one for each row"
