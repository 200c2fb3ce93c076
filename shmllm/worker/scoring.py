"""Log-probabilities of tokens, and of their most likely alternatives.

This module owns the arithmetic on a CPU: float32 whatever the model's dtype, and piece by piece
where there are many rows, so that the workspace stays bounded. The GPU's scorer shares its limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from shmllm.outputs.logprobs import TokenLogprobs
from shmllm.params.token_table import PADDING, TokenTable
from shmllm.worker.arrays import FloatArray, IntArray, LongArray
from shmllm.worker.batch import Alternatives

WORKSPACE_BYTES = 2**27
_COPIES = 3
"""The number of arrays of the logits' size that exist at once: logits, log-probabilities, and
temporary arrays of comparing and selecting."""

ALL = -1
"""A number of alternatives that stands for the whole vocabulary."""


def score_tokens(
    logits: torch.Tensor, token_ids: torch.Tensor, asked: Sequence[Alternatives], normalise: bool
) -> TokenLogprobs:
    """Score one token in each row of logits, and its alternatives.

    Args:
        logits: (N, V) float32.
        token_ids: (N,) int64, the token to score in each row.
        asked: the alternatives of each row.
        normalise: whether scores are log-probabilities; else they are the logits.
    """
    ks = [num_alternatives(each, logits.shape[1]) for each in asked]
    scores, own, ranks = _score_own(logits, token_ids, normalise)
    top_ids, top_scores = _best(scores, ks)
    ends = np.cumsum(ks).tolist()
    for row, each in enumerate(asked):
        if not isinstance(each, int):
            places = slice(ends[row] - ks[row], ends[row])
            top_ids[places], top_scores[places] = each, scores[row, torch.from_numpy(each)].numpy()
    return TokenLogprobs(ks, own, ranks, top_ids, top_scores)


def score_table(
    logits: torch.Tensor, token_ids: torch.Tensor, table: TokenTable, normalise: bool
) -> TokenLogprobs:
    """Score one token in each row of logits, and the tokens of the same row of a table. Arguments
    are else those of `score_tokens`."""
    scores, own, ranks = _score_own(logits, token_ids, normalise)
    asked = torch.from_numpy(rows_of(table))
    found = scores.gather(1, asked.clamp(min=0)).masked_fill(asked == PADDING, -math.inf)
    ids = asked.to(torch.int32).numpy().ravel()
    return TokenLogprobs([table.width] * len(asked), own, ranks, ids, found.numpy().ravel())


def _score_own(
    logits: torch.Tensor, token_ids: torch.Tensor, normalise: bool
) -> tuple[torch.Tensor, FloatArray, IntArray]:
    """Return all scores, (N, V), and the scores and ranks of the tokens themselves, (N,)."""
    scores = logits.log_softmax(dim=1) if normalise else logits
    chosen = scores.gather(1, token_ids[:, None])
    # numpy compares and counts several times as fast as torch here.
    better = np.count_nonzero(scores.numpy() > chosen.numpy(), axis=1)
    return scores, chosen[:, 0].numpy().copy(), better.astype(np.int32) + np.int32(1)


def num_alternatives(asked: Alternatives, vocab_size: int) -> int:
    """Return the number of alternatives that a row asks for."""
    if not isinstance(asked, int):
        return len(asked)
    return vocab_size if asked == ALL else min(asked, vocab_size)


def score_in_pieces(
    num_rows: int,
    vocab_size: int,
    logits_of: Callable[[int, int], torch.Tensor],
    token_ids: torch.Tensor,
    k: int,
    normalise: bool,
    table: TokenTable | None = None,
) -> TokenLogprobs:
    """Do what `score_tokens` does, for rows whose logits may not fit into memory at once.

    Args:
        num_rows: the number of rows, N.
        vocab_size: entries in a row of logits, V.
        logits_of: (begin, end) -> (end - begin, V) float32 logits of these rows.
        token_ids: (N,) int64, the token to score in each row.
        k: the number of alternatives of each row; ALL for the whole vocabulary.
        normalise: whether scores are log-probabilities; else they are the logits.
        table: the k alternatives of each row; None: the most likely ones.
    """
    step = max(WORKSPACE_BYTES // (4 * _COPIES * vocab_size), 1)
    parts = []
    for begin in range(0, num_rows, step):
        end = min(begin + step, num_rows)
        logits, tokens = logits_of(begin, end), token_ids[begin:end]
        if table is None:
            parts.append(score_tokens(logits, tokens, [k] * (end - begin), normalise))
        else:
            parts.append(score_table(logits, tokens, table.rows(begin, end), normalise))
    return joined(parts)


def rows_of(table: TokenTable) -> LongArray:
    """Return the rows of a table, (rows, width) int64."""
    return np.array(table.ids, np.int64).reshape(-1, table.width)


def joined(parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
    """Concatenate the log-probabilities of several pieces of rows."""
    if len(parts) == 1:
        return parts[0]
    return TokenLogprobs(
        [k for part in parts for k in part.ks],
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.ranks for part in parts]),
        np.concatenate([part.top_ids for part in parts]),
        np.concatenate([part.top_logprobs for part in parts]),
    )


def _best(scores: torch.Tensor, ks: list[int]) -> tuple[IntArray, FloatArray]:
    """Return the ids and scores of each row's `ks` best entries, row after row."""
    kinds = set(ks)
    if len(kinds) == 1:
        values, ids = scores.topk(ks[0], dim=1)
        return ids.to(torch.int32).numpy().ravel(), values.numpy().ravel()
    ends = np.cumsum(ks)
    all_ids = np.zeros(ends[-1], np.int32)
    all_values = np.zeros(ends[-1], np.float32)
    for k in kinds - {0}:
        # One row with k = vocabulary size must not make the other rows sort the vocabulary.
        rows = [row for row, own in enumerate(ks) if own == k]
        places = (ends[rows] - k)[:, None] + np.arange(k)
        values, ids = scores[rows].topk(k, dim=1)
        all_ids[places], all_values[places] = ids.numpy(), values.numpy()
    return all_ids, all_values
