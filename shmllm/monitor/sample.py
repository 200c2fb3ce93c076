"""Samples: all values in an engine's segments at one time.

This module maps and reads the control segment of an engine and the segments of its front ends. It
writes nothing and sends the engine nothing. It must not know the use of the samples.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from shmllm.errors import IpcError
from shmllm.ipc import layout
from shmllm.ipc.client_bell import bell_nonce
from shmllm.ipc.client_state import client_state
from shmllm.ipc.control import ControlView
from shmllm.ipc.error_log import LoggedError
from shmllm.ipc.histogram import Durations
from shmllm.ipc.layout import OUTPUT_RING_LAYOUT, REQUEST_RING_LAYOUT, RingLayout
from shmllm.ipc.ring_state import peek
from shmllm.ipc.segment import LOST, Segment, pid_namespace
from shmllm.ipc.states import Parked, SegmentKind
from shmllm.ipc.stats import Histogram, Mark
from shmllm.ipc.step_log import StepLogReader
from shmllm.ipc.words import Word
from shmllm.monitor.find import PROC, FoundEngine, Identity, identity_of, open_segment

COMMAND_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class ClientSample:
    """The sample of one front end.

    Attributes:
        pid: its pid in its own pid namespace.
        command: its command line; "" if this process may not read it.
        requests_used: the unread share of its request ring, 0 to 1.
        outputs_used: the unread share of its output ring, 0 to 1.
        is_parked: whether it is parked or about to park; None if it waits on the doorbell of its
            segment at another engine.
        state: whether it is idle, active, hung or stopped (see `client_state`), or dead.
        bell: the nonce of the segment whose doorbell wakes it, in hexadecimal digits. A front end
            of several engines has the same one at each of them.
    """

    pid: int
    command: str
    requests_used: float
    outputs_used: float
    is_parked: bool | None
    state: str
    bell: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """The sample of one engine.

    Attributes:
        time_ns: the time of the sample, on `time.monotonic_ns()`.
        state: the engine's state in words.
        model: the name of the model; "" until the engine has its configuration.
        device: the name of the device that runs the model; "" until the engine is ready.
        precision: what the model is computed in; "" until the engine is ready.
        speculation: who drafts tokens; "" until the engine is ready, and if nobody does.
        uptime_s: the time since the start of the engine process; 0 if it is not known.
        stats: the statistics, by the lower-case name of the Stat.
        durations: the histograms since the engine's start.
        clients: the samples of its front ends.
        errors: the distinct errors that it has recorded, the latest one last.
    """

    time_ns: int
    state: str
    model: str
    device: str
    precision: str
    speculation: str
    uptime_s: float
    stats: dict[str, int]
    durations: dict[Histogram, Durations]
    clients: tuple[ClientSample, ...]
    errors: tuple[LoggedError, ...]


class Watch:
    """Keeps an engine's segments mapped and samples them repeatedly.

    Args:
        engine: the engine.

    Raises:
        IpcError: the engine has ended.
    """

    def __init__(self, engine: FoundEngine) -> None:
        self.engine = engine
        self._control = engine.open()
        self._view = ControlView(self._control)
        self._clients: dict[Identity, tuple[Segment, str]] = {}

    @property
    def is_over(self) -> bool:
        """Whether the engine has ended, or its segment lost its file."""
        return self._control.is_lost or not self._control.is_owned()

    def sample(self) -> Sample:
        """A sample of the engine now; an engine that has ended still gives its last values."""
        self._find_clients()
        view, now_ns = self._view, time.monotonic_ns()
        started_ns = view.mark_ns(Mark.STARTED)
        return Sample(
            now_ns,
            "dead" if self.is_over else view.describe(),
            view.model(),
            view.device(),
            view.precision(),
            view.speculation(),
            (now_ns - started_ns) / 1e9 if started_ns else 0.0,
            view.stats(),
            view.all_durations(),
            tuple(_sample_client(*client) for client in self._clients.values()),
            tuple(view.errors()),
        )

    def durations(self) -> dict[Histogram, Durations]:
        """The engine's histograms of durations since its start."""
        return self._view.all_durations()

    def step_log(self) -> StepLogReader:
        """The reader of the engine's step log; the caller closes it."""
        return self._view.step_log()

    def mark_ns(self, mark: Mark) -> int:
        """The time of an event of the engine's start on `time.monotonic_ns()`; 0 before it."""
        return self._view.mark_ns(mark)

    def last_words(self) -> str:
        """The cause of the engine's death, or "" if the engine could not store one."""
        return f"its segment {LOST}" if self._control.is_lost else self._view.last_words()

    def close(self) -> None:
        for segment, _ in self._clients.values():
            segment.close()
        self._clients.clear()
        self._view.close()
        self._control.close()

    def _find_clients(self) -> None:
        """Map the segments of new front ends, and close those of front ends that have left."""
        found: dict[Identity, Path] = {}
        for path in self.engine.client_paths():
            with contextlib.suppress(OSError):
                found[identity_of(path)] = path
        lost = {identity for identity, (client, _) in self._clients.items() if client.is_lost}
        for identity in (self._clients.keys() - found.keys()) | lost:
            self._clients.pop(identity)[0].close()
        for identity in found.keys() - self._clients.keys():
            with contextlib.suppress(IpcError):
                segment = open_segment(found[identity], SegmentKind.CLIENT)
                self._clients[identity] = segment, _command_of(segment)


def _sample_client(segment: Segment, command: str) -> ClientSample:
    bell = bell_nonce(segment)
    parked = Word(segment.buffer, layout.CLIENT_PARKED_OFFSET)
    sample = ClientSample(
        segment.creator_pid,
        command,
        _used(segment, REQUEST_RING_LAYOUT),
        _used(segment, OUTPUT_RING_LAYOUT),
        parked.load() != Parked.NO if bell == segment.nonce else None,
        client_state(segment) if segment.is_owned() else "dead",
        f"{bell:x}",
    )
    parked.close()
    return sample


def _used(segment: Segment, ring: RingLayout) -> float:
    used = peek(segment.buffer, ring, 0).used_bytes / ring.capacity_bytes
    # The cursors may move between the two loads, so the difference may leave the range.
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
