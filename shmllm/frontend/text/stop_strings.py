"""StopStringChecker: finds stop strings in text that arrives in pieces.

A stop string can extend over several pieces, so the end of the text can be the beginning of a stop
string. This module must not know tokens or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string in the text.

    Attributes:
        stop: the stop string.
        text_length: the number of characters of the whole text to keep. They include the stop
            string if the checker has `include_stop`.
    """

    stop: str
    text_length: int


class StopStringChecker:
    """Finds the stop string that is complete first.

    The result does not depend on the division of the text into pieces. The match is the
    occurrence with the earliest end, and of several with the same end the one that comes first in
    the list, as in vLLM.

    Args:
        stop: the stop strings, in the order of precedence.
        include_stop: whether the text to keep includes the stop string.

    Attributes:
        match: the match; None if no stop string was found yet. The checker ignores text after
            a match.
        num_held: the number of characters at the end of the text that may be the beginning of
            a stop string. A stream must not emit them yet.
    """

    __slots__ = (
        "_first_characters",
        "_include_stop",
        "_num_seen",
        "_stops",
        "_tail",
        "_tail_size",
        "match",
        "num_held",
    )

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(text for text in stop if text))
        self._first_characters = {stop[0] for stop in self._stops}
        self._include_stop = include_stop
        self._tail_size = max(map(len, self._stops), default=1) - 1
        self._tail = ""
        self._num_seen = 0
        self.match: StopMatch | None = None
        self.num_held = 0

    def feed(self, delta: str, *, check: bool = True) -> StopMatch | None:
        """Add the next piece of text.

        Args:
            delta: the piece.
            check: False ignores stop strings that end in this piece, because the output has
                not reached `min_tokens`. A stop string that begins in this piece and ends in a
                later one is found there.

        Returns:
            The match, for the piece that completes a stop string and all later ones; None
            before.
        """
        if self.match is not None or not delta or not self._stops:
            return self.match
        window = self._tail + delta
        if check:
            self._search(window)
        self._num_seen += len(delta)
        self._tail = window[-self._tail_size :] if self._tail_size else ""
        self.num_held = self._count_held()
        return self.match

    def _search(self, window: str) -> None:
        first: str | None = None
        first_end = len(window) + 1
        for stop in self._stops:
            start = window.find(stop, max(0, len(self._tail) - len(stop) + 1))
            if 0 <= start < first_end - len(stop):
                first, first_end = stop, start + len(stop)
        if first is not None:
            kept = first_end if self._include_stop else first_end - len(first)
            self.match = StopMatch(first, self._num_seen - len(self._tail) + kept)

    def _count_held(self) -> int:
        # If the text to keep includes the stop string, no character is ever removed.
        if self.match is not None or self._include_stop:
            return 0
        for length in range(len(self._tail), 0, -1):
            if self._tail[-length] not in self._first_characters:
                continue
            suffix = self._tail[-length:]
            if any(len(stop) > length and stop.startswith(suffix) for stop in self._stops):
                return length
        return 0
