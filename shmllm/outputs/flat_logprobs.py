"""FlatLogprobs: log-probabilities as parallel lists, for callers that read whole columns.

`SamplingParams(flat_logprobs=True)` asks for it instead of `LogprobsList`. The names of the lists
are those of vLLM's class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, overload

from shmllm.outputs.logprob_lists import Position
from shmllm.outputs.logprobs import Logprob


@dataclass
class FlatLogprobs(MutableSequence[Position | None]):
    """The log-probabilities of T tokens, with E entries together; also a sequence of T dicts.

    Positions can be appended, not changed. A None, for the first token of a prompt, becomes a
    position without entries, which reads as an empty dict.

    Attributes:
        start_indices: (T,) the first entry of each position.
        end_indices: (T,) the entry after the last one of each position.
        token_ids: (E,) token ids; the first of each position is the token itself.
        logprobs: (E,) natural logarithms of the tokens' probabilities.
        ranks: (E,) ranks in the vocabulary, from 1; None where `Logprob.rank` is.
        decoded_tokens: (E,) texts; None without detokenization.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    @classmethod
    def of(cls, positions: Iterable[Position | None]) -> FlatLogprobs:
        """The log-probabilities of a sequence of dicts."""
        flat = cls()
        flat.extend(positions)
        return flat

    def append(self, value: Position | None) -> None:
        """Append the log-probabilities of one more token."""
        self.start_indices.append(len(self.token_ids))
        for token, logprob in (value or {}).items():
            self.token_ids.append(token)
            self.logprobs.append(logprob.logprob)
            self.ranks.append(logprob.rank)
            self.decoded_tokens.append(logprob.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> Position: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> Position | FlatLogprobs:
        if isinstance(index, slice):
            return FlatLogprobs.of(self[each] for each in range(*index.indices(len(self))))
        return {
            self.token_ids[entry]: Logprob(
                self.logprobs[entry], self.ranks[entry], self.decoded_tokens[entry]
            )
            for entry in range(self.start_indices[index], self.end_indices[index])
        }

    def __iter__(self) -> Iterator[Position]:
        return map(self.__getitem__, range(len(self)))

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TypeError("the positions of FlatLogprobs cannot be replaced")

    def __delitem__(self, index: Any) -> NoReturn:
        raise TypeError("the positions of FlatLogprobs cannot be deleted")

    def insert(self, index: int, value: Any) -> NoReturn:
        """Not supported: positions can only be appended."""
        raise TypeError("positions can be appended to FlatLogprobs, not inserted")
