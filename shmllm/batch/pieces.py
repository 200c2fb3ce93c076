"""Runs requests in pieces, for calls that take a list and refuse all of it if one is wrong.

This module owns the size of the pieces, and finds the wrong requests of one. It must not know what
the call does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from shmllm.errors import EnginePausedError, RequestError

MOST_TEXTS = 256
MOST_CHARACTERS = 2**18
"""A piece ends at either. It is large, because the engine has nothing to do between two pieces."""

Request = TypeVar("Request")
Output = TypeVar("Output")
Call = Callable[[Sequence[Request]], Sequence[Output]]


@dataclass(frozen=True, slots=True)
class Refused:
    """The result of a text that the call refused.

    Attributes:
        error: the reason.
    """

    error: str


def run_in_pieces(
    call: Call[Request, Output],
    texts: Iterator[Request],
    length: Callable[[Request], int] = len,  # type: ignore[assignment]
) -> Iterator[tuple[int, Output | Refused]]:
    """Calls a function with pieces of the texts.

    Args:
        call: returns a result for each text of a list. It raises RequestError, and does nothing, if
            one of them is wrong.
        texts: any number of texts, of which one piece is read at a time.
        length: how many characters each counts as.

    Yields:
        (index of the text, result), in the order of the texts.

    Raises:
        EnginePausedError: the engine takes no requests now. No text is to blame.
    """
    places = count()
    while piece := _take(texts, length):
        for result in _results(call, piece):
            yield next(places), result


def _take(texts: Iterator[Request], length: Callable[[Request], int]) -> list[Request]:
    piece: list[Request] = []
    num_characters = 0
    while len(piece) < MOST_TEXTS and num_characters < MOST_CHARACTERS:
        text = next(texts, None)
        if text is None:
            break
        piece.append(text)
        num_characters += length(text)
    return piece


def _results(call: Call[Request, Output], piece: Sequence[Request]) -> Iterator[Output | Refused]:
    """The results of a piece. If it is refused, those of its halves."""
    try:
        results = call(piece)
    except EnginePausedError:
        raise
    except RequestError as error:
        if len(piece) == 1:
            yield Refused(str(error))
            return
    else:
        yield from results
        return
    middle = len(piece) // 2
    yield from _results(call, piece[:middle])
    yield from _results(call, piece[middle:])
