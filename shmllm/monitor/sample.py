"""One look at an engine: everything that its segments say at a moment.

Owns how an engine's control segment and those of its front ends are kept mapped and read.
Writes nothing, and asks the engine nothing. Must not know what is made of it.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from shmllm.errors import IpcError
from shmllm.ipc import layout
from shmllm.ipc.control import ControlView
from shmllm.ipc.histogram import Durations
from shmllm.ipc.layout import (
    OUTPUT_RING_LAYOUT,
    REQUEST_RING_LAYOUT,
    Parked,
    RingLayout,
    SegmentKind,
)
from shmllm.ipc.ring_state import peek
from shmllm.ipc.segment import Segment, pid_namespace
from shmllm.ipc.stats import Histogram, Mark
from shmllm.ipc.step_log import StepLogReader
from shmllm.ipc.words import Word
from shmllm.monitor.find import PROC, FoundEngine, Identity, identity_of, open_segment

COMMAND_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class ClientSample:
    """A front end.

    Attributes:
        pid: as its own namespace counts.
        command: its arguments, joined; empty if they cannot be seen.
        requests_used: share of its request ring that is unread.
        outputs_used: share of its output ring that is unread.
        is_parked: it sleeps, or is about to.
    """

    pid: int
    command: str
    requests_used: float
    outputs_used: float
    is_parked: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """What an engine said at a moment.

    Attributes:
        time_ns: of the look, on `time.monotonic_ns()`.
        state: in words.
        device: what the model runs on; empty before the engine is ready.
        uptime_s: since the engine's process began; 0 if it did not say when.
        stats: by lower-case name of the Stat.
        durations: since the engine's start.
    """

    time_ns: int
    state: str
    device: str
    uptime_s: float
    stats: dict[str, int]
    durations: dict[Histogram, Durations]
    clients: tuple[ClientSample, ...]


class Watch:
    """Keeps an engine's segments mapped, to look at them again and again.

    Args:
        engine: which.

    Raises:
        IpcError: it is gone.
    """

    def __init__(self, engine: FoundEngine) -> None:
        self.engine = engine
        self._control = engine.open()
        self._view = ControlView(self._control)
        self._clients: dict[Identity, tuple[Segment, str]] = {}

    @property
    def is_over(self) -> bool:
        """Whether the engine has ended."""
        return not self._control.is_owned()

    def look(self) -> Sample:
        """What it says now; of one that has ended, what it said last."""
        self._find_clients()
        view, now_ns = self._view, time.monotonic_ns()
        started_ns = view.mark_ns(Mark.STARTED)
        return Sample(
            now_ns,
            "ended" if self.is_over else view.describe(),
            view.device(),
            (now_ns - started_ns) / 1e9 if started_ns else 0.0,
            view.stats(),
            view.all_durations(),
            tuple(_look_at(*client) for client in self._clients.values()),
        )

    def durations(self) -> dict[Histogram, Durations]:
        """How long things took since the engine's start."""
        return self._view.all_durations()

    def step_log(self) -> StepLogReader:
        """The engine's latest steps."""
        return self._view.step_log()

    def mark_ns(self, mark: Mark) -> int:
        """When a moment of its start was; 0 if it was not yet."""
        return self._view.mark_ns(mark)

    def last_words(self) -> str:
        """Why it died, if it could say so."""
        return self._view.last_words()

    def close(self) -> None:
        for segment, _ in self._clients.values():
            segment.close()
        self._clients.clear()
        self._view.close()
        self._control.close()

    def _find_clients(self) -> None:
        """Map the segments of front ends that came, let go of those that left."""
        found: dict[Identity, Path] = {}
        for path in self.engine.client_paths():
            with contextlib.suppress(OSError):
                found[identity_of(path)] = path
        for identity in self._clients.keys() - found.keys():
            self._clients.pop(identity)[0].close()
        for identity in found.keys() - self._clients.keys():
            with contextlib.suppress(IpcError):
                segment = open_segment(found[identity], SegmentKind.CLIENT)
                self._clients[identity] = segment, _command_of(segment)


def _look_at(segment: Segment, command: str) -> ClientSample:
    parked = Word(segment.buffer, layout.CLIENT_PARKED_OFFSET)
    sample = ClientSample(
        segment.creator_pid,
        command,
        _used(segment, REQUEST_RING_LAYOUT),
        _used(segment, OUTPUT_RING_LAYOUT),
        parked.load() != Parked.NO,
    )
    parked.close()
    return sample


def _used(segment: Segment, ring: RingLayout) -> float:
    used = peek(segment.buffer, ring, 0).used_bytes / ring.capacity_bytes
    # The two cursors are read one after the other, and the ring goes on in between.
    return min(max(used, 0.0), 1.0)


def _command_of(segment: Segment) -> str:
    if segment.creator_pid_namespace != pid_namespace():
        return ""
    try:
        arguments = (PROC / str(segment.creator_pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    words = arguments[: 4 * COMMAND_CHARACTERS].decode("utf-8", errors="replace").split("\0")
    text = " ".join([Path(words[0]).name, *words[1:]])
    return "".join(c if c.isprintable() else " " for c in text).strip()[:COMMAND_CHARACTERS]
