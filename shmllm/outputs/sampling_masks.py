"""The tokens among which each token was drawn: those that a request's masks and filters kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]
WORD = np.dtype("<i4")
"""A word of `SamplingMasks` as bytes."""


@dataclass
class SamplingMask:
    """The tokens that could be drawn, for each token of an output.

    Attributes:
        token_ids: one list for each token of the output, in ascending order: the ids that the
            masks, and `min_p`, `top_k` and `top_p`, left.
    """

    token_ids: list[list[int]]


@dataclass(frozen=True, slots=True)
class SamplingMasks:
    """The kept tokens of N samples of a step.

    Attributes:
        words: int32, for each sample the number of its tokens, and then their ids.
        begins: (N + 1,) int64, where each sample begins among `words`; the last is their number.
    """

    words: Words
    begins: npt.NDArray[np.int64]

    @classmethod
    def of_entries(
        cls, num_samples: int, samples: npt.NDArray[Any], token_ids: npt.NDArray[Any]
    ) -> SamplingMasks:
        """
        Args:
            num_samples: N.
            samples: (K,) the sample of each kept token, ascending.
            token_ids: (K,) the kept tokens.
        """
        counts = np.bincount(samples, minlength=num_samples)
        begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts + 1)])
        words = np.empty(begins[-1], np.int32)
        words[begins[:-1]] = counts
        words[np.arange(len(token_ids)) + samples + 1] = token_ids
        return cls(words, begins)

    def take(self, chosen: Sequence[int]) -> SamplingMasks:
        """Return those of some samples, in increasing order."""
        if len(chosen) == len(self.begins) - 1:
            return self
        spans = [self.words[self.begins[i] : self.begins[i + 1]] for i in chosen]
        ends = np.cumsum([0, *(len(span) for span in spans)], dtype=np.int64)
        return SamplingMasks(np.concatenate([self.words[:0], *spans]), ends)

    def encoded(self, begin: int, end: int) -> bytes:
        """Return the words of the samples from `begin` to `end`, little-endian."""
        return self.words[self.begins[begin] : self.begins[end]].astype(WORD).tobytes()
