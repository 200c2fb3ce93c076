"""Engines followed over time: each look against the one before.

Owns what is kept between two looks, and which engines are followed. Must not know how the
figures are shown.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable

from shmllm.errors import IpcError
from shmllm.monitor.figures import Figures, figures
from shmllm.monitor.find import FoundEngine, Identity, find_engines
from shmllm.monitor.sample import Sample, Watch

HISTORY = 240
FIND_PERIOD_S = 1.0


class Track:
    """One engine.

    Args:
        engine: which.

    Attributes:
        figures: of the time between the latest two looks.
        history: generated tokens/s of the latest intervals, oldest first.
        is_over: whether it had ended at the last look.

    Raises:
        IpcError: it is gone.
    """

    def __init__(self, engine: FoundEngine) -> None:
        self.engine = engine
        self._watch = Watch(engine)
        self._now: Sample = self._watch.look()
        self.figures: Figures = figures(engine, self._now, None)
        self.history: deque[float] = deque(maxlen=HISTORY)
        self.is_over = False
        self._last_words = ""

    def update(self) -> None:
        """Look again."""
        self.is_over = self._watch.is_over
        if self.is_over:
            self._last_words = self._watch.last_words()
        before, self._now = self._now, self._watch.look()
        self.figures = figures(self.engine, self._now, before)
        self.history.append(self.figures["generated_tokens_per_s"])

    def farewell(self) -> str:
        """One line about an engine that has ended."""
        lines = self._last_words.strip().splitlines()
        cause = f": {lines[-1]}" if lines else ""
        return f"engine {self.engine.title} has ended{cause}"

    def close(self) -> None:
        self._watch.close()


class Tracks:
    """Engines as they come and go.

    Args:
        find: which there are now. It is asked at most once in FIND_PERIOD_S, since it has to
            look at every process.
    """

    def __init__(self, find: Callable[[], list[FoundEngine]] = find_engines) -> None:
        self._find = find
        self._next_find = 0.0
        self._by_identity: dict[Identity, Track] = {}
        self.update()

    @property
    def all(self) -> list[Track]:
        """In the order of `find`."""
        return list(self._by_identity.values())

    def update(self) -> list[Track]:
        """Look at all again. Returns those that have ended, already closed."""
        tracks = self.all
        for track in tracks:
            track.update()
        if (now := time.monotonic()) >= self._next_find:
            self._next_find = now + FIND_PERIOD_S
            self._add_new()
        ended = [track for track in tracks if track.is_over]
        for track in ended:
            del self._by_identity[track.engine.identity]
            track.close()
        return ended

    def _add_new(self) -> None:
        before, self._by_identity = self._by_identity, {}
        for engine in self._find():
            with contextlib.suppress(IpcError):
                track = before.pop(engine.identity, None) or Track(engine)
                self._by_identity[engine.identity] = track
        self._by_identity |= before  # not found any more: about to end

    def close(self) -> None:
        for track in self._by_identity.values():
            track.close()
        self._by_identity.clear()
