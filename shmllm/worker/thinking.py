"""Which token the limit of a request's reasoning forces.

This module must not know logits. What it says depends only on the request's own tokens.
"""

from __future__ import annotations

import numpy as np

from shmllm.params.thinking import ThinkingBudget
from shmllm.worker.arrays import IntArray, LongArray


class ThinkingProgress:
    """How far one request is in its reasoning.

    The meaning is vLLM's: reasoning begins behind the last `begin` in the prompt and the output,
    unless `closes` follows. Tokens that are the beginning of `end` already are not repeated.

    Args:
        budget: the limit of the request.
    """

    def __init__(self, budget: ThinkingBudget) -> None:
        self._limit = budget.limit
        self._begin = np.array(budget.begin, np.int64)
        self._end = np.array(budget.end, np.int64)
        self._closes = np.array(budget.closes, np.int64)
        self._begin_at = self._end_at = -1
        self._num_scanned = 0
        self._kept = (-1, -1, 0)
        self._scans_drafts = False

    def rewind(self) -> None:
        """Forget what was found in all calls since the last `rewind` but the first: those had
        drafted tokens."""
        if self._scans_drafts:
            self._begin_at, self._end_at, self._num_scanned = self._kept
            self._scans_drafts = False

    def forced_token(self, token_ids: IntArray) -> int | None:
        """Return the only token that may follow; None if any may.

        Args:
            token_ids: the prompt and the output so far, with those of the last call.
        """
        self._begin_at = max(self._begin_at, _last(self._begin, token_ids, self._num_scanned))
        self._end_at = max(self._end_at, _last(self._closes, token_ids, self._num_scanned))
        self._num_scanned = len(token_ids)
        if not self._scans_drafts:
            self._kept = self._begin_at, self._end_at, self._num_scanned
            self._scans_drafts = True
        num_used = len(token_ids) - self._begin_at - len(self._begin)
        if self._begin_at <= self._end_at or num_used < self._limit:
            return None
        written = len(self._end) - 1
        while written and not np.array_equal(token_ids[-written:], self._end[:written]):
            written -= 1
        return int(self._end[written])


def _last(sequence: LongArray, token_ids: IntArray, num_scanned: int) -> int:
    """Return the last position of a sequence that ends behind the scanned tokens; -1 without one.

    Args:
        sequence: the token ids to find.
        token_ids: the token ids to search.
        num_scanned: the number of tokens at the beginning that were searched before.
    """
    first = max(num_scanned - len(sequence) + 1, 0)
    found = token_ids[first : len(token_ids) - len(sequence) + 1] == sequence[0]
    for position in (np.flatnonzero(found)[::-1] + first).tolist():
        if np.array_equal(token_ids[position : position + len(sequence)], sequence):
            return int(position)
    return -1
