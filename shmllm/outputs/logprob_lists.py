"""What users get as `logprobs`: reads like a list of dictionaries, holds arrays.

Owns how an entry is put together when somebody reads it. Must not know tokenizers: it is
given a function from (tokens before, token) to text.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from shmllm.outputs.logprobs import Logprob

Position = dict[int, Logprob]
TextOf = Callable[[Sequence[int], int], str]
"""(tokens before it, token) -> what the token adds to their text."""

MAX_CONTEXT = 4


class LogprobStore:
    """Log-probabilities of one request's tokens, in the order of the tokens.

    Attributes:
        k: alternatives of each token, the same for all.
        total: sum of the tokens' own.
    """

    __slots__ = ("k", "logprobs", "ranks", "top_ids", "top_logprobs", "total")

    def __init__(self) -> None:
        self.k = 0
        self.total = 0.0
        self.logprobs = array("f")
        self.ranks = array("i")
        self.top_ids = array("i")
        self.top_logprobs = array("f")

    def __len__(self) -> int:
        return len(self.logprobs)


class LogprobsList(Sequence[Position | None]):
    """For each token a dict from token ids to `Logprob`: the token itself first, then the
    most likely ones. Equal to a list of the same entries; becomes one when pickled.

    Args:
        token_ids: the tokens that the store's entries are of, perhaps more.
        store: the numbers; entries that come later are not seen.
        text_of: for `decoded_token`, which is None without it.
        context: tokens in front of `token_ids`.
        begins_with_none: one entry more, of a first token that nothing predicts.
        span: which of the entries are seen; None for all.
    """

    __slots__ = ("_context", "_has_none", "_indices", "_store", "_text_of", "_token_ids")

    def __init__(
        self,
        token_ids: Sequence[int],
        store: LogprobStore,
        text_of: TextOf | None = None,
        context: Sequence[int] = (),
        begins_with_none: bool = False,
        span: range | None = None,
    ) -> None:
        self._token_ids = token_ids
        self._store = store
        self._text_of = text_of
        self._context = context
        self._has_none = begins_with_none
        self._indices = range(len(store) + begins_with_none) if span is None else span

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Position | None: ...

    @overload
    def __getitem__(self, index: slice) -> LogprobsList: ...

    def __getitem__(self, index: int | slice) -> Position | LogprobsList | None:
        if isinstance(index, slice):
            return LogprobsList(
                self._token_ids,
                self._store,
                self._text_of,
                self._context,
                self._has_none,
                self._indices[index],
            )
        return self._entry(self._indices[index])

    def __iter__(self) -> Iterator[Position | None]:
        return map(self._entry, self._indices)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | LogprobsList):
            return NotImplemented
        return len(self) == len(other) and all(
            mine == theirs for mine, theirs in zip(self, other, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def _entry(self, index: int) -> Position | None:
        place = index - self._has_none
        if place < 0:
            return None
        store = self._store
        begin = place * store.k
        entry = {
            self._token_ids[place]: Logprob(
                store.logprobs[place],
                store.ranks[place],
                self._text(place, self._token_ids[place]),
            )
        }
        for rank, offset in enumerate(range(begin, begin + store.k), 1):
            token = store.top_ids[offset]
            if token not in entry:
                logprob = store.top_logprobs[offset]
                entry[token] = Logprob(logprob, rank, self._text(place, token))
        return entry

    def _text(self, place: int, token: int) -> str | None:
        if self._text_of is None:
            return None
        before = self._token_ids[max(place - MAX_CONTEXT, 0) : place]
        if len(before) < MAX_CONTEXT:
            before = [*self._context[len(before) - MAX_CONTEXT :], *before]
        return self._text_of(before, token)
