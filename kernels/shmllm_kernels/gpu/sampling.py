"""Launches the sampler, which samples the next token of each row.

It takes two launches, or more if a row has filters. `chunk_summaries` applies masks and penalties
and reduces each chunk of a row, `top_candidates` lists the candidates of rows with filters,
`threshold_search` finds the thresholds of rows with too many candidates, and `token_choice` chooses
the token. Rows are independent, and sums have a fixed order or are those of whole numbers: a row's
token depends on its logits, its parameters, its seed and its position alone.

Expected on an H100 (3.0 TB/s copied, 132 processors at 1.7 GHz), for bfloat16 logits of 128,256
entries, 32 chunks a row; never measured. "Entry" is what a kernel moves for each entry of a row.

| launch | rows | entry | operations for an entry | 1 row | 256 rows |
|---|---|---|---|---|---|
| summarise_chunks | greedy | 2 B | 10 | 3 us | 22 us, memory |
| summarise_chunks | drawn, no filters | 2 B | 60: Philox, logarithms | 4 us | 140 us, integers |
| summarise_chunks | filtered | 2 + 4 B | 10 | 3 us | 66 us, memory |
| count_by_distance | filtered | 4 B | 70: 16 distances | 8 us | 80 us, arithmetic |
| collect_candidates | filtered | 4 B | 10 | 8 us | 44 us, memory |
| choose_tokens | greedy, no filters | 0 | 0 | 3 us | 3 us |
| choose_tokens | a list, each threshold | 0 | 0 | 10 us | 20 us |
| collect_candidates | a search | 4 B | 30, and an atomic | 10 us | 200 us, atomics |
| narrow_interval | a search | 4 B, and 16 KB a program | 25 | 5 us | 60 us, memory |
| draw_chunks | a search | 4 B, and 16 KB a program | 65 | 6 us | 150 us, integers |
| these two | no search | 0 | 0 | 2 us | 3 us, to start 2,048 programs |
| mask_dropped | all, processed log-probabilities | 8 B | 5 | 3 us | 88 us, memory |

On an H200 `summarise_chunks` of 256 greedy rows took 53 us: a program waited for its row's number,
then for its entries, then for the row's parameters, and reduced four times: 3.3 us, and 528 of the
8,192 programs ran at a time. Now the entries arrive while the others are waited for, and a program
reduces twice: 1.7 us, and 28 us for all (to be confirmed or refuted).

A search has three tables. `collect_candidates` fills the first, so a row with top_k or top_p takes
two launches of `narrow_interval`, and a row with both takes five; then one of `draw_chunks`. In all
a search takes 25 us for one row with top_p and 40 us with both, and 0.5 ms and 0.8 ms for 256 rows;
three launches that find nothing to search take 6 to 9 us, and six take twice that. The first table
of a search gets at worst one atomic for each entry, and the device does about 96 in a cycle; the
other tables get the entries of one bin. Whatever the logits are, a program reads at most
MOST_CHUNKS chunks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from shmllm_kernels.gpu.chunk_summaries import summarise_chunks
from shmllm_kernels.gpu.configs import next_power_of_two
from shmllm_kernels.gpu.sampling_scratch import SamplingScratch
from shmllm_kernels.gpu.threshold_search import NUM_LEVELS, NUM_TABLES, narrow_interval
from shmllm_kernels.gpu.token_choice import choose_tokens, draw_chunks, mask_dropped
from shmllm_kernels.gpu.top_candidates import (
    CAPACITY,
    NUM_PIVOTS,
    collect_candidates,
    count_by_distance,
)
from shmllm_kernels.reference.sampling import SamplingColumns

__all__ = ["DraftedTokens", "SamplingScratch", "TokenMasks", "sample"]

COUNT_BLOCK = 256
CHOOSE_BLOCK = 512
SEARCH_BLOCK = 1024
SEARCH_PROGRAMS = 2048
"""The number of programs of a launch for searches, if there are fewer chunks a program than
MOST_CHUNKS. Most steps have no search, and a launch then costs what it takes to start its
programs."""
MOST_CHUNKS = 8
Filters = tuple[Tensor, Tensor, Tensor, Tensor]
"""Temperature, top_k, top_p and min_p, (R,) each."""


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
class DraftedTokens:
    """Output tokens of some rows that are drafted, and not in their counts. The rows of a request
    follow each other, each behind one more drafted token than the row before.

    Attributes:
        tokens: (N,) int64, the token before the one that each row samples.
        num_drafted: (N,) int32, how many of ``tokens`` are drafted ones before the row's sample:
            its own and those of the rows before it. 0 for the first row of a request.
    """

    tokens: Tensor
    num_drafted: Tensor


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
    num_searches: int | None = 2,
    last_tokens: Tensor | None = None,
    drafted: DraftedTokens | None = None,
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
        num_searches: the largest number of thresholds that a filtered row may have to search, 0 to
            2: top_k and top_p count as one each, min_p does not; None: no row is filtered, that is,
            has filters and is not greedy.
        last_tokens: (R,) int64; gets each row's token, too.
        drafted: the tokens that penalties count besides ``token_counts``; None: there are none.
    """
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, scratch.chunk)
    _check(tokens, logits, rows, positions, columns, scratch, token_counts, masks)
    _check_drafted(drafted, num_rows)
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
        rows if drafted is None else drafted.tokens,
        rows if drafted is None else drafted.num_drafted,
        rows if masks is None else masks.words,
        rows if masks is None else masks.rows,
        logits.stride(0),
        vocab_size,
        0 if token_counts is None else token_counts.stride(0),
        0 if masks is None else masks.words.stride(0),
        vocab_size,
        num_chunks,
        HAS_COUNTS=token_counts is not None,
        HAS_DRAFTS=drafted is not None,
        HAS_MASK=masks is not None,
        KEEPS_ALL=keeps_processed,
        CHUNK=scratch.chunk,
        num_warps=8,
    )
    if num_searches is not None:
        _list_candidates(rows, filters, scratch, num_rows)
        _search(rows, positions, filters, columns.seeds, scratch, num_rows, num_searches)
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
        scratch.tied_best,
        scratch.tied_id,
        scratch.num_tied,
        scratch.kept_ties,
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
        CHUNK=scratch.chunk,
        CHUNKS=next_power_of_two(num_chunks),
        BLOCK=CHOOSE_BLOCK,
        CAPACITY=CAPACITY,
        num_warps=8,
    )
    if keeps_processed:
        kept = (scratch.processed_logits, scratch.thresholds, scratch.last_ids, rows)
        mask_dropped[grid](*kept, vocab_size, vocab_size, CHUNK=scratch.chunk, num_warps=8)


def _list_candidates(
    rows: Tensor, filters: Filters, scratch: SamplingScratch, num_rows: int
) -> None:
    """Lists the candidates of each filtered row, or begins its search."""
    values = scratch.processed_logits
    parts = (scratch.counts, scratch.masses)
    lists = (scratch.candidates, scratch.candidate_ids, scratch.num_candidates)
    grid, sizes, chunks = _shapes(scratch, num_rows)
    options = chunks | {"BLOCK": COUNT_BLOCK, "NUM_PIVOTS": NUM_PIVOTS, "num_warps": 4}
    count_by_distance[grid](
        values,
        scratch.chunk_max,
        *parts,
        scratch.tables[0],
        rows,
        *filters,
        *sizes,
        **options,
    )
    collect_candidates[grid](
        values,
        scratch.chunk_max,
        *parts,
        *lists,
        scratch.tables[0],
        scratch.tables[1],
        scratch.states[0],
        rows,
        *filters,
        *sizes,
        CAPACITY=CAPACITY,
        **options,
    )


def _search(
    rows: Tensor,
    positions: Tensor,
    filters: Filters,
    seeds: Tensor,
    scratch: SamplingScratch,
    num_rows: int,
    num_searches: int,
) -> None:
    """Searches the thresholds of the rows without list, and draws from each of their chunks."""
    (_, num_chunks), sizes, chunks = _shapes(scratch, num_rows)
    least = triton.cdiv(num_chunks, MOST_CHUNKS)
    grid = (num_rows, min(max(SEARCH_PROGRAMS // num_rows, least), num_chunks))
    num_tables = NUM_LEVELS * num_searches
    tables = [scratch.tables[number % NUM_TABLES] for number in range(num_tables + 1)]
    for number in range(1, num_tables):
        narrow_interval[grid](
            scratch.processed_logits,
            scratch.chunk_max,
            scratch.num_candidates,
            *tables[number - 1 : number + 2],
            scratch.states[(number - 1) % 2],
            scratch.states[number % 2],
            rows,
            *filters[1:],
            *sizes,
            CHUNKS=chunks["CHUNKS"],
            BLOCK=SEARCH_BLOCK,
            num_warps=4,
        )
    last = max(num_tables - 1, 0)
    draw_chunks[grid](
        scratch.processed_logits,
        scratch.chunk_max,
        scratch.chunk_best,
        scratch.chunk_id,
        scratch.tied_best,
        scratch.tied_id,
        scratch.num_tied,
        scratch.thresholds,
        scratch.kept_ties,
        scratch.num_candidates,
        tables[last],
        scratch.states[last % 2],
        rows,
        positions,
        *filters[1:],
        seeds,
        *sizes,
        **chunks,
        num_warps=8,
    )


def _shapes(
    scratch: SamplingScratch, num_rows: int
) -> tuple[tuple[int, int], tuple[int, int, int], dict[str, int]]:
    """Returns the grid of all chunks, the sizes that kernels take, and their constants."""
    vocab_size = scratch.processed_logits.shape[1]
    num_chunks = triton.cdiv(vocab_size, scratch.chunk)
    chunks = {"CHUNK": scratch.chunk, "CHUNKS": next_power_of_two(num_chunks)}
    return (num_rows, num_chunks), (vocab_size, vocab_size, num_chunks), chunks


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


def _check_drafted(drafted: DraftedTokens | None, num_rows: int) -> None:
    if drafted is None:
        return
    for tensor, dtype in ((drafted.tokens, torch.int64), (drafted.num_drafted, torch.int32)):
        assert tensor.shape == (num_rows,), "drafted tokens: one for each row"
        assert tensor.dtype is dtype, "drafted tokens are int64, their numbers int32"
        assert tensor.is_contiguous(), "drafted tokens must be contiguous"
