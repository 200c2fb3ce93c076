"""Drafts what followed the last tokens of a request where they occurred before.

Of the stretches of tokens at the end that occurred before, with a length between two bounds, the
longest counts, as in vLLM ("prompt lookup"), and the place where it occurred last: texts that
change while they repeat themselves follow their latest form. A draft that reaches the end of the
known tokens goes on with its own beginning. A search reads all tokens of the request once, at some
GB a second, and needs no index.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from shmllm.core.request import Request


class NgramDrafter:
    """See `Drafter`.

    Args:
        shortest: the smallest number of tokens that must have occurred before.
        longest: the largest number of tokens that are looked for.
    """

    catches_up = False

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest

    def draft(self, request: Request, most: int) -> Sequence[int]:
        """See `Drafter.draft`."""
        token_ids = request.token_ids
        end = self._end_of_match(token_ids)
        if not end:
            return ()
        period = len(token_ids) - end
        return [token_ids[end + place % period] for place in range(most)]

    def _end_of_match(self, token_ids: array[int]) -> int:
        """The position behind the last occurrence of the longest stretch; 0 without one."""
        tokens = np.frombuffer(token_ids, np.int32)
        last = len(tokens) - 1
        ends = np.flatnonzero(tokens[:last] == tokens[last])
        length, found = 1, 0
        while ends.size:
            if length >= self._shortest:
                found = int(ends[-1]) + 1
            if length == self._longest:
                break
            ends = ends[ends >= length]
            ends = ends[tokens[ends - length] == tokens[last - length]]
            length += 1
        return found
