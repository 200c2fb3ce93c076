"""Drafts what followed the last tokens of a request where they occurred before.

The definition is vLLM's, "prompt lookup": of the stretches of tokens at the end that occurred
before, with a length between two bounds, the longest counts, and the place where it occurred first.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from shmllm.core.request import Request


class NgramIndex:
    """Where each stretch of a request's tokens occurred first.

    Args:
        sizes: the lengths of the stretches, the longest first.
    """

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._ends: dict[bytes, int] = {}
        self._num_indexed = 0

    def after(self, token_ids: array[int], most: int) -> Sequence[int]:
        """The tokens behind the first occurrence of the longest stretch at the end.

        Args:
            token_ids: the tokens: those of the last call, and perhaps further ones.
            most: the largest number of tokens to return.
        """
        text, size = memoryview(token_ids).cast("B"), memoryview(token_ids).itemsize
        num_tokens, ends = len(token_ids), self._ends
        # A stretch is indexed by where it ends, once a token follows it.
        for end in range(self._num_indexed + 1, num_tokens):
            for length in self._sizes:
                if length <= end:
                    ends.setdefault(bytes(text[(end - length) * size : end * size]), end)
        self._num_indexed = max(num_tokens - 1, 0)
        for length in self._sizes:
            if length < num_tokens:
                begin = ends.get(bytes(text[(num_tokens - length) * size :]))
                if begin is not None:
                    return token_ids[begin : begin + most]
        return ()


class NgramDrafter:
    """
    Args:
        shortest: the smallest number of tokens that must have occurred before.
        longest: the largest number of tokens that are looked for.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)

    def draft(self, request: Request, most: int) -> Sequence[int]:
        """See `Drafter.draft`."""
        if request.drafting is None:
            request.drafting = NgramIndex(self._sizes)
        index: NgramIndex = request.drafting
        return index.after(request.token_ids, most)
