"""ReceivedMasks: the tokens among which those of one output were drawn, as they arrive."""

from __future__ import annotations

import numpy as np

from shmllm.outputs.sampling_masks import WORD


class ReceivedMasks:
    """The kept tokens of one request; see `SamplingMasks` for the bytes."""

    __slots__ = ("_data", "_lists", "_num_forgotten", "_num_repeated")

    def __init__(self) -> None:
        self._data = bytearray()
        self._lists: list[list[int]] = []
        self._num_forgotten = 0
        self._num_repeated = 0

    def start_over(self) -> None:
        """Expect all tokens so far once more."""
        self._read()
        self._data.clear()
        self._num_repeated = self._num_forgotten + len(self._lists)

    def add(self, data: bytes) -> None:
        """Add bytes, which may end within those of a token."""
        self._data += data

    def between(self, begin: int, end: int) -> list[list[int]]:
        """Return those of the output's tokens from `begin` to `end`, which have arrived and were
        not forgotten."""
        self._read()
        begin, end = begin - self._num_forgotten, end - self._num_forgotten
        assert begin >= 0, "nobody reads a stream's tokens twice"
        assert len(self._lists) >= end, "the masks of tokens arrive before their rows"
        return self._lists[begin:end]

    def forget(self, end: int) -> None:
        """Free those of the output's tokens before `end`, which nobody reads again."""
        del self._lists[: end - self._num_forgotten]
        self._num_forgotten = end

    def _read(self) -> None:
        """Move the tokens that are complete from the bytes to the lists."""
        words = np.frombuffer(self._data, WORD, len(self._data) // WORD.itemsize).tolist()
        read = 0
        while read < len(words) and read + words[read] < len(words):
            first = read + 1
            read = first + words[read]
            if self._num_repeated:
                self._num_repeated -= 1
            else:
                self._lists.append(words[first:read])
        del self._data[: WORD.itemsize * read]
