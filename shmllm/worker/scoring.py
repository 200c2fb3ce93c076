"""Log-probabilities of tokens, and of the most likely ones beside them.

Owns the arithmetic: float32 whatever the model computes in, and in pieces of rows where
there are many, so that the workspace stays bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from shmllm.outputs.logprobs import TokenLogprobs
from shmllm.worker.arrays import FloatArray, IntArray

WORKSPACE_BYTES = 2**27
_COPIES = 3
"""Arrays as large as the logits that are alive at once: logits, log-probabilities, and
what comparing and selecting takes."""

ALL = -1
"""As a number of alternatives: the whole vocabulary."""


def score_tokens(
    logits: torch.Tensor, token_ids: torch.Tensor, ks: Sequence[int], normalise: bool
) -> TokenLogprobs:
    """
    Args:
        logits: (N, V) float32.
        token_ids: (N,) int64, the token to score in each row.
        ks: alternatives of each row, ALL for every entry.
        normalise: log-probabilities; False takes the logits as they are.
    """
    size = logits.shape[1]
    ks = [size if k == ALL else min(k, size) for k in ks]
    scores = logits.log_softmax(dim=1) if normalise else logits
    chosen = scores.gather(1, token_ids[:, None])
    # numpy counts and compares several times as fast as torch does here.
    better = np.count_nonzero(scores.numpy() > chosen.numpy(), axis=1)
    top_ids, top_scores = _best(scores, ks)
    return TokenLogprobs(
        ks,
        chosen[:, 0].numpy().copy(),
        better.astype(np.int32) + np.int32(1),
        top_ids,
        top_scores,
    )


def score_in_pieces(
    num_rows: int,
    vocab_size: int,
    logits_of: Callable[[int, int], torch.Tensor],
    token_ids: torch.Tensor,
    k: int,
    normalise: bool,
) -> TokenLogprobs:
    """As `score_tokens`, for rows whose logits do not fit into memory at once.

    Args:
        logits_of: (begin, end) -> the logits of these rows.
    """
    step = max(WORKSPACE_BYTES // (4 * _COPIES * vocab_size), 1)
    parts = []
    for begin in range(0, num_rows, step):
        end = min(begin + step, num_rows)
        logits = logits_of(begin, end)
        parts.append(score_tokens(logits, token_ids[begin:end], [k] * (end - begin), normalise))
    return joined(parts)


def joined(parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
    """Those of several pieces of rows, one piece behind the other."""
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
    """Each row's `ks` best entries, one row behind the other."""
    kinds = set(ks)
    if len(kinds) == 1:
        values, ids = scores.topk(ks[0], dim=1)
        return ids.to(torch.int32).numpy().ravel(), values.numpy().ravel()
    ends = np.cumsum(ks)
    all_ids = np.zeros(ends[-1], np.int32)
    all_values = np.zeros(ends[-1], np.float32)
    for k in kinds - {0}:
        # One row that wants the whole vocabulary must not make the others sort it.
        rows = [row for row, own in enumerate(ks) if own == k]
        places = (ends[rows] - k)[:, None] + np.arange(k)
        values, ids = scores[rows].topk(k, dim=1)
        all_ids[places], all_values[places] = ids.numpy(), values.numpy()
    return all_ids, all_values
