"""Logprob, and the arrays that carry log-probabilities from the sampler to the front end.

This module must not know the model, nor how the arrays cross between processes. `logprob_lists`
contains the view of them that users read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclass
class Logprob:
    """The log-probability of one token at one position.

    Attributes:
        logprob: the natural logarithm of the token's probability, or a logit if the engine's
            `logprobs_mode` is "raw_logits" or "processed_logits".
        rank: the rank of the token in the vocabulary; 1 is the most likely token.
        decoded_token: the text of the token; None without detokenization. A token that ends
            inside a character has an empty text, and the token that completes the character
            has all of it.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True, eq=False)
class TokenLogprobs:
    """Log-probabilities of T tokens, in the sampler's order.

    Attributes:
        ks: the number of alternatives of each token.
        logprobs: (T,) the log-probabilities of the tokens themselves.
        ranks: (T,) the ranks of the tokens themselves.
        top_ids: (sum of ks,) the ids of each token's alternatives, most likely first.
        top_logprobs: (sum of ks,) the log-probabilities of `top_ids`.
    """

    ks: list[int]
    logprobs: Floats
    ranks: Ints
    top_ids: Ints
    top_logprobs: Floats

    def columns(self, chosen: Sequence[range], rows: list[int]) -> LogprobColumns:
        """The log-probabilities of some of the tokens, as columns of a step's output.

        Args:
            chosen: the positions of the tokens of each row, in increasing order. Tokens of a row
                have the same number of alternatives.
            rows: the output rows.
        """
        taken = self.take([position for span in chosen for position in span])
        ks = [self.ks[span.start] for span in chosen]
        return LogprobColumns(
            rows, ks, taken.logprobs, taken.ranks, taken.top_ids, taken.top_logprobs
        )

    def take(self, chosen: Sequence[int]) -> TokenLogprobs:
        """The log-probabilities of the tokens at some positions, in increasing order."""
        if len(chosen) == len(self.ks):
            return self
        ends = np.cumsum(self.ks).tolist()
        entries = [np.arange(ends[j] - self.ks[j], ends[j]) for j in chosen]
        taken = np.concatenate([np.zeros(0, np.int64), *entries])
        picked = np.array(chosen, np.int64)
        return TokenLogprobs(
            [self.ks[j] for j in chosen],
            self.logprobs[picked],
            self.ranks[picked],
            self.top_ids[taken],
            self.top_logprobs[taken],
        )

    def for_prompt(self, number: int, first: int) -> PromptLogprobs:
        """The log-probabilities as those of consecutive prompt tokens.

        Args:
            number: the number of the request.
            first: the position of the first token in the prompt.
        """
        k = self.ks[0] if self.ks else 0
        return PromptLogprobs(
            number, first, k, self.logprobs, self.ranks, self.top_ids, self.top_logprobs
        )


@dataclass(slots=True, eq=False)
class LogprobColumns:
    """Log-probabilities of the tokens that one step sampled, for the rows that want them.

    T is the number of tokens in these rows.

    Attributes:
        rows: the rows of the step's output columns, in increasing order.
        ks: the number of alternatives of each token, for each of `rows`.
        logprobs: (T,) the log-probabilities of the sampled tokens.
        ranks: (T,) the ranks of the sampled tokens.
        top_ids: (sum of k over the T tokens,) the ids of each token's alternatives, most likely
            first.
        top_logprobs: the log-probabilities of `top_ids`, in the same shape.
    """

    rows: list[int]
    ks: list[int]
    logprobs: Floats
    ranks: Ints
    top_ids: Ints
    top_logprobs: Floats

    @property
    def num_bytes(self) -> int:
        """The size of all columns in bytes, with 4 bytes per number."""
        return 8 * (len(self.rows) + len(self.logprobs) + len(self.top_ids))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LogprobColumns):
            return NotImplemented
        return (self.rows, self.ks) == (other.rows, other.ks) and all(
            np.array_equal(getattr(self, name), getattr(other, name), equal_nan=True)
            for name in ("logprobs", "ranks", "top_ids", "top_logprobs")
        )

    def slice_rows(self, begin: int, end: int, counts: Sequence[int]) -> LogprobColumns | None:
        """The columns of the output rows in [begin, end), with `begin` as row 0.

        Args:
            begin: the first output row.
            end: the output row after the last one.
            counts: the number of tokens of every output row.

        Returns:
            None if none of these rows has log-probabilities.
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
    """Log-probabilities of T consecutive prompt tokens of one request.

    Attributes:
        number: the number of the request.
        first: the position of the first of these tokens in the prompt.
        k: the number of alternatives of each token.
        logprobs: (T,) the log-probabilities of the prompt's tokens.
        ranks: (T,) the ranks of the prompt's tokens.
        top_ids: (T * k,) the ids of each token's alternatives, most likely first.
        top_logprobs: (T * k,) the log-probabilities of `top_ids`.
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
        """Split into parts of at most `most_bytes`, or of one token if one token is larger."""
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
