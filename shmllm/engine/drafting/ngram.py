"""Drafts what followed the last tokens of a request where they occurred before.

The definition is vLLM's, "prompt lookup": of the stretches of tokens at the end that occurred
before, with a length between two bounds, the longest counts, and the place where it occurred first.
A search reads all tokens of the request once, at some GB a second, and needs no index.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from shmllm.core.request import Request


class NgramDrafter:
    """
    Args:
        shortest: the smallest number of tokens that must have occurred before.
        longest: the largest number of tokens that are looked for.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest

    def draft(self, request: Request, most: int) -> Sequence[int]:
        """See `Drafter.draft`."""
        end = self._end_of_match(request.token_ids)
        return request.token_ids[end : end + most] if end else ()

    def _end_of_match(self, token_ids: array[int]) -> int:
        """The position behind the first occurrence of the longest stretch; 0 without one."""
        tokens = np.frombuffer(token_ids, np.int32)
        last = len(tokens) - 1
        ends = np.flatnonzero(tokens[:last] == tokens[last])
        length, found = 1, 0
        while ends.size:
            if length >= self._shortest:
                found = int(ends[0]) + 1
            if length == self._longest:
                break
            ends = ends[ends >= length]
            ends = ends[tokens[ends - length] == tokens[last - length]]
            length += 1
        return found
