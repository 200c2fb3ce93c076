"""Stop strings in text that arrives piece by piece.

Owns the search across the borders of pieces, and how much text at the end may still turn
out to begin a stop string. Must not know about tokens or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found.

    Attributes:
        stop: the stop string.
        text_length: characters of the whole text to keep; the stop string is among them only
            if the checker was asked to include it.
    """

    stop: str
    text_length: int


class StopStringChecker:
    """Finds the stop string that is complete first.

    The result does not depend on how the text is cut into pieces: of all occurrences the one
    with the earliest end counts, and of those with the same end the longest. So the text that
    is kept holds no stop string (or exactly the one at its end).

    Attributes:
        match: what was found, None so far. Text fed after a match is ignored.
        num_held: characters at the end of the text so far that may belong to a stop string
            which is not complete yet; a stream must not show them now.
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
        """Take the next piece of text.

        Args:
            delta: what follows the text fed so far.
            check: False takes the piece without looking for a stop string that ends in it
                (`min_tokens` not reached). One that begins in it and ends in a later piece is
                found then.

        Returns:
            The match, from the piece that completes a stop string on; None before.
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
        found: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = window.find(stop, max(0, len(self._tail) - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                found = candidate if found is None else min(found, candidate)
        if found is not None:
            end, start, stop = found
            kept = end if self._include_stop else start
            self.match = StopMatch(stop, self._num_seen - len(self._tail) + kept)

    def _count_held(self) -> int:
        # With the stop string included, nothing shown before its end is ever taken back.
        if self.match is not None or self._include_stop:
            return 0
        for length in range(len(self._tail), 0, -1):
            if self._tail[-length] not in self._first_characters:
                continue
            suffix = self._tail[-length:]
            if any(len(stop) > length and stop.startswith(suffix) for stop in self._stops):
                return length
        return 0
