"""KeptTokens: the tokens among which those of one output were drawn, as they arrive."""

from __future__ import annotations

import numpy as np


class KeptTokens:
    """The kept tokens of one request; see `SamplingMasks` for the bytes."""

    __slots__ = ("_data", "_lists")

    def __init__(self) -> None:
        self._data = bytearray()
        self._lists: list[list[int]] = []

    def add(self, data: bytes) -> None:
        """Add bytes, which may end within those of a token."""
        self._data += data

    def between(self, begin: int, end: int) -> list[list[int]]:
        """Return those of the output's tokens from `begin` to `end`, which have arrived."""
        words = np.frombuffer(self._data, np.int32).tolist()
        read = 0
        while read < len(words) and read + words[read] < len(words):
            first = read + 1
            read = first + words[read]
            self._lists.append(words[first:read])
        del self._data[: 4 * read]
        return self._lists[begin:end]
