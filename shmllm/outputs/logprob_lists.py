"""LogprobsList: the log-probabilities in outputs, a list-like view of compact arrays.

vLLM returns a list of dicts. An object per token and alternative takes longer to construct than
the log-probabilities take to compute, so this module constructs an entry when it is read. It must
not know tokenizers: the caller passes a function that returns the text of a token.
"""

from __future__ import annotations

import copy
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, overload

from shmllm.outputs.logprobs import Logprob

Position = dict[int, Logprob]
TextOf = Callable[[Sequence[int], int], str]
"""(preceding tokens, token) -> the text that the token adds to the text of the preceding ones."""

MAX_CONTEXT = 4
"""The number of preceding tokens that TextOf gets, to complete a character of several tokens."""


class LogprobStore:
    """Log-probabilities of the tokens of one request, as arrays in the order of the tokens.

    Args:
        is_ranked: whether the alternatives are the most likely tokens, in this order; otherwise
            they are those of `SamplingParams.logprob_token_ids`, and their ranks are not known.

    Attributes:
        k: the number of alternatives, which all T tokens share.
        total: the sum of the log-probabilities of the tokens themselves.
        logprobs: (T,) float32, the log-probability of each token.
        ranks: (T,) int32, the rank of each token; 1 is the most likely token.
        top_ids: (T * k,) int32, the ids of the alternatives of each token.
        top_logprobs: (T * k,) float32, the log-probabilities of `top_ids`.
    """

    __slots__ = ("is_ranked", "k", "logprobs", "ranks", "top_ids", "top_logprobs", "total")

    def __init__(self, is_ranked: bool = True) -> None:
        self.is_ranked = is_ranked
        self.k = 0
        self.total = 0.0
        self.logprobs = array("f")
        self.ranks = array("i")
        self.top_ids = array("i")
        self.top_logprobs = array("f")

    def __len__(self) -> int:
        return len(self.logprobs)

    def truncate(self, length: int) -> None:
        """Forget the tokens behind the first `length`."""
        del self.logprobs[length:], self.ranks[length:]
        del self.top_ids[length * self.k :], self.top_logprobs[length * self.k :]
        self.total = sum(self.logprobs, 0.0)


class LogprobsList(Sequence[Position | None]):
    """A sequence with one dict from token ids to `Logprob` per token.

    The dict of a token contains the token itself first, then the alternatives. It is made when it
    is read first, and kept: what a program changes in it stays, in slices, too. The sequence
    equals a list of the same entries; sums with lists, copies, pickle and deepcopy make it a list.

    Args:
        token_ids: the tokens of the store's entries; more tokens may follow.
        store: the arrays. Entries that are appended later do not become part of this list.
        text_of: the function for `Logprob.decoded_token`; None leaves it None.
        context: the tokens before `token_ids`.
        begins_with_none: whether a None precedes the entries, for the first token of a prompt,
            which has no log-probability.
        span: the positions of the entries that the list contains; None for all.
    """

    __slots__ = (
        "_context",
        "_entries",
        "_has_none",
        "_indices",
        "_store",
        "_text_of",
        "_token_ids",
    )

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
        self._entries: dict[int, Position] = {}
        self._indices = range(len(store) + begins_with_none) if span is None else span

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Position | None: ...

    @overload
    def __getitem__(self, index: slice) -> LogprobsList: ...

    def __getitem__(self, index: int | slice) -> Position | LogprobsList | None:
        if isinstance(index, slice):
            part = LogprobsList(
                self._token_ids,
                self._store,
                self._text_of,
                self._context,
                self._has_none,
                self._indices[index],
            )
            part._entries = self._entries
            return part
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

    def __add__(self, other: list[Any] | LogprobsList) -> list[Any]:
        return [*self, *other]

    def __radd__(self, other: list[Any]) -> list[Any]:
        return [*other, *self]

    def copy(self) -> list[Position | None]:
        """A list of the same entries."""
        return list(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        # dataclasses.asdict and astuple convert what is in a list and deepcopy other objects.
        # Without a look at who copies, entries would stay Logprobs, which json cannot write.
        caller = sys._getframe(2)
        if caller.f_globals.get("__name__") == "dataclasses":
            convert = caller.f_globals[caller.f_code.co_name]
            converted: list[Any] = convert(list(self), caller.f_locals[_factory_name(caller)])
            return converted
        return copy.deepcopy(list(self), memo)

    def _entry(self, index: int) -> Position | None:
        position = index - self._has_none
        if position < 0:
            return None
        if position not in self._entries:
            self._entries[position] = self._made(position)
        return self._entries[position]

    def _made(self, position: int) -> Position:
        store = self._store
        begin = position * store.k
        entry = {
            self._token_ids[position]: Logprob(
                store.logprobs[position],
                store.ranks[position],
                self._text(position, self._token_ids[position]),
            )
        }
        for rank, offset in enumerate(range(begin, begin + store.k), 1):
            token = store.top_ids[offset]
            if token not in entry:
                logprob = store.top_logprobs[offset]
                known_rank = rank if store.is_ranked else None
                entry[token] = Logprob(logprob, known_rank, self._text(position, token))
        return entry

    def _text(self, position: int, token: int) -> str | None:
        if self._text_of is None:
            return None
        before = self._token_ids[max(position - MAX_CONTEXT, 0) : position]
        if len(before) < MAX_CONTEXT:
            before = [*self._context[len(before) - MAX_CONTEXT :], *before]
        return self._text_of(before, token)


def _factory_name(frame: FrameType) -> str:
    """The name of the second argument of a frame's function: "dict_factory" or "tuple_factory"."""
    return frame.f_code.co_varnames[1]
