"""Engines followed over time: each look against the one before.

Owns what is kept between two looks, and which engines are followed. Must not know how the
figures are shown.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable

from shmllm.errors import IpcError
from shmllm.monitor.figures import Figures, figures
from shmllm.monitor.find import FoundEngine, Identity, find_engines
from shmllm.monitor.sample import Sample, Watch

HISTORY = 240


class Track:
    """One engine.

    Args:
        engine: which.

    Attributes:
        history: generated tokens/s of the latest intervals, oldest first.
        is_over: whether it had ended at the last look.

    Raises:
        IpcError: it is gone.
    """

    def __init__(self, engine: FoundEngine) -> None:
        self.engine = engine
        self._watch = Watch(engine)
        self._before: Sample | None = None
        self._now = self._watch.look()
        self.history: deque[float] = deque(maxlen=HISTORY)
        self.is_over = False
        self._last_words = ""

    @property
    def figures(self) -> Figures:
        """Of the time between the latest two looks."""
        return figures(self.engine, self._now, self._before)

    def update(self) -> None:
        """Look again."""
        self.is_over = self._watch.is_over
        if self.is_over:
            self._last_words = self._watch.last_words()
        self._before, self._now = self._now, self._watch.look()
        rate = self.figures["generated_tokens_per_s"]
        if rate is not None:
            self.history.append(rate)

    def farewell(self) -> str:
        """One line about an engine that has ended."""
        lines = self._last_words.strip().splitlines()
        cause = f": {lines[-1]}" if lines else ""
        return f"engine {self.engine.title} has ended{cause}"

    def close(self) -> None:
        self._watch.close()


class Tracks:
    """All engines that run, as they come and go.

    Args:
        find: which there are now.
    """

    def __init__(self, find: Callable[[], list[FoundEngine]] = find_engines) -> None:
        self._find = find
        self._by_identity: dict[Identity, Track] = {}
        self.update()

    @property
    def all(self) -> list[Track]:
        """In the order of `find`."""
        return list(self._by_identity.values())

    def update(self) -> list[Track]:
        """Look at all again. Returns those that have ended, already closed."""
        before, self._by_identity = self._by_identity, {}
        for engine in self._find():
            with contextlib.suppress(IpcError):
                if (track := before.pop(engine.identity, None)) is None:
                    track = Track(engine)
                else:
                    track.update()
                self._by_identity[engine.identity] = track
        for track in before.values():
            track.update()
            track.close()
        return list(before.values())

    def close(self) -> None:
        for track in self._by_identity.values():
            track.close()
        self._by_identity.clear()
