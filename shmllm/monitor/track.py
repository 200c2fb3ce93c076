"""Follows engines over time and computes the figures of each interval between two samples.

This module owns the state between two samples and the set of followed engines. It must not know
how figures are shown.
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
    """Follows one engine.

    Args:
        engine: the engine.

    Attributes:
        figures: the figures of the interval between the latest two samples.
        history: the generated tokens/s of the latest intervals, oldest first.
        is_over: whether the engine had ended at the last sample.

    Raises:
        IpcError: the engine has ended.
    """

    def __init__(self, engine: FoundEngine) -> None:
        self.engine = engine
        self._watch = Watch(engine)
        self._now: Sample = self._watch.sample()
        self.figures: Figures = figures(engine, self._now, None)
        self.history: deque[float] = deque(maxlen=HISTORY)
        self.is_over = False
        self._last_words = ""

    def update(self) -> None:
        """Take the next sample."""
        self.is_over = self._watch.is_over
        if self.is_over:
            self._last_words = self._watch.last_words()
        before, self._now = self._now, self._watch.sample()
        self.figures = figures(self.engine, self._now, before)
        self.history.append(self.figures["generated_tokens_per_s"])

    def end_message(self) -> str:
        """A line about the end of the engine, with the last line of its last words."""
        lines = self._last_words.strip().splitlines()
        cause = f": {lines[-1]}" if lines else ""
        return f"engine {self.engine.title} has ended{cause}"

    def close(self) -> None:
        self._watch.close()


class Tracks:
    """Follows all engines, including those that start later.

    Args:
        find: a function that returns the engines that run now. It is called at most once in
            FIND_PERIOD_S, because it reads the descriptors of every process.
    """

    def __init__(self, find: Callable[[], list[FoundEngine]] = find_engines) -> None:
        self._find = find
        self._next_find = 0.0
        self._by_identity: dict[Identity, Track] = {}
        self.update()

    @property
    def all(self) -> list[Track]:
        """All followed engines, in the order of `find`."""
        return list(self._by_identity.values())

    def update(self) -> list[Track]:
        """Sample all engines. Returns the closed tracks of engines that have ended."""
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
        # Engines that `find` no longer returns are about to end; a later update removes them.
        self._by_identity |= before

    def close(self) -> None:
        for track in self._by_identity.values():
            track.close()
        self._by_identity.clear()
