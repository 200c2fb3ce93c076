"""Log-probabilities: as columns on their way, as dictionaries when somebody looks.

Owns `Logprob`, the columns that cross from the sampler to the front end, and the list-like
view of them that users get. An object per token and alternative costs more than computing
the numbers, so there are none until an entry is read. Must not know the model or transport.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclass(slots=True)
class Logprob:
    """One token's log-probability at one position.

    Attributes:
        logprob: natural logarithm, or what the engine's `logprobs_mode` says.
        rank: 1 for the most likely token of the vocabulary.
        decoded_token: its text on its own.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True, eq=False)
class TokenLogprobs:
    """Log-probabilities of T tokens, in the sampler's order.

    Attributes:
        ks: alternatives of each.
        logprobs: (T,) of the tokens themselves.
        ranks: (T,) of them.
        top_ids: (sum of ks,) each token's alternatives, best first.
        top_logprobs: as `top_ids`.
    """

    ks: list[int]
    logprobs: Floats
    ranks: Ints
    top_ids: Ints
    top_logprobs: Floats

    def columns(self, chosen: list[int], rows: list[int]) -> LogprobColumns:
        """Those of some tokens, in increasing order, as the columns of these output rows."""
        if len(chosen) == len(self.ks):
            return LogprobColumns(
                rows, self.ks, self.logprobs, self.ranks, self.top_ids, self.top_logprobs
            )
        ends = np.cumsum(self.ks).tolist()
        ks = [self.ks[j] for j in chosen]
        entries = [np.arange(ends[j] - self.ks[j], ends[j]) for j in chosen]
        taken = np.concatenate([np.zeros(0, np.int64), *entries])
        return LogprobColumns(
            rows,
            ks,
            self.logprobs[chosen],
            self.ranks[chosen],
            self.top_ids[taken],
            self.top_logprobs[taken],
        )

    def of_prompt(self, number: int, first: int) -> PromptLogprobs:
        """As those of a prompt's tokens from position `first` on."""
        k = self.ks[0] if self.ks else 0
        return PromptLogprobs(
            number, first, k, self.logprobs, self.ranks, self.top_ids, self.top_logprobs
        )


@dataclass(slots=True, eq=False)
class LogprobColumns:
    """Log-probabilities of a step's sampled tokens, of the rows that asked.

    Row `rows[j]` of the step's output columns has `ks[j]` alternatives for each of its
    tokens.

    Attributes:
        logprobs: (T,) of the sampled tokens.
        ranks: (T,) of the sampled tokens.
        top_ids: (sum of k over the T tokens,) each token's alternatives, best first.
        top_logprobs: as `top_ids`.
    """

    rows: list[int]
    ks: list[int]
    logprobs: Floats
    ranks: Ints
    top_ids: Ints
    top_logprobs: Floats

    @property
    def num_bytes(self) -> int:
        return 8 * (len(self.rows) + len(self.logprobs) + len(self.top_ids))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LogprobColumns):
            return NotImplemented
        return (self.rows, self.ks) == (other.rows, other.ks) and all(
            np.array_equal(getattr(self, name), getattr(other, name), equal_nan=True)
            for name in ("logprobs", "ranks", "top_ids", "top_logprobs")
        )

    def cut(self, begin: int, end: int, counts: Sequence[int]) -> LogprobColumns | None:
        """Those of the output rows in [begin, end), which are counted from `begin` then.

        Args:
            counts: tokens of every output row.
        """
        chosen = [j for j, row in enumerate(self.rows) if begin <= row < end]
        if not chosen:
            return None
        first, stop = chosen[0], chosen[-1] + 1
        sizes = [counts[row] for row in self.rows]
        tops = [count * k for count, k in zip(sizes, self.ks, strict=True)]
        tokens = slice(sum(sizes[:first]), sum(sizes[:stop]))
        entries = slice(sum(tops[:first]), sum(tops[:stop]))
        return LogprobColumns(
            [row - begin for row in self.rows[first:stop]],
            self.ks[first:stop],
            self.logprobs[tokens],
            self.ranks[tokens],
            self.top_ids[entries],
            self.top_logprobs[entries],
        )


@dataclass(slots=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of some of a prompt's tokens, one behind the other.

    Attributes:
        number: of the request.
        first: position of the first of these tokens in the prompt.
        k: alternatives of each.
        logprobs: (T,) of the prompt's own tokens.
        ranks: (T,) of them.
        top_ids: (T * k,) best first.
        top_logprobs: as `top_ids`.
    """

    number: int
    first: int
    k: int
    logprobs: Floats
    ranks: Ints
    top_ids: Ints
    top_logprobs: Floats

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PromptLogprobs):
            return NotImplemented
        own, others = (self.number, self.first, self.k), (other.number, other.first, other.k)
        return own == others and all(
            np.array_equal(getattr(self, name), getattr(other, name), equal_nan=True)
            for name in ("logprobs", "ranks", "top_ids", "top_logprobs")
        )

    def parts(self, most_bytes: int) -> Iterator[PromptLogprobs]:
        """The same in pieces of at most `most_bytes`, or of one token if that has more."""
        size = max(most_bytes // (8 + 8 * self.k), 1)
        for begin in range(0, len(self.logprobs), size):
            end = begin + size
            entries = slice(begin * self.k, end * self.k)
            yield PromptLogprobs(
                self.number,
                self.first + begin,
                self.k,
                self.logprobs[begin:end],
                self.ranks[begin:end],
                self.top_ids[entries],
                self.top_logprobs[entries],
            )
