"""One front end as the engine sees it: its channel, its life, and what it has yet to read."""

from __future__ import annotations

import os
import select
import time
from collections import deque
from enum import Enum, auto

from shmllm.ipc.channel import CoreChannel
from shmllm.ipc.segment import Segment
from shmllm.wire.codec import Parts
from shmllm.wire.messages import Kind

RECORDS_PER_TURN = 64


class SessionEnd(Enum):
    """Why a session is over."""

    CLOSED = auto()
    DIED = auto()
    TOO_SLOW = auto()


class Session:
    """
    Args:
        place: the front end's number, which its requests carry.
        control: the engine's segment.
        segment: the front end's segment; closed with the session.
        pidfd: becomes readable when the front end is gone; closed with the session. None
            where its pid means nothing here; then its ownership lock is looked at.
        patience_s: how long outputs may find no room before the front end counts as too
            slow; None waits for ever, which harms nobody when there is only one.
    """

    def __init__(
        self,
        place: int,
        control: Segment,
        segment: Segment,
        pidfd: int | None,
        patience_s: float | None,
    ) -> None:
        self.place = place
        self.channel = CoreChannel(control, segment)
        self._segment = segment
        self._pidfd = pidfd
        self._patience_s = patience_s
        self._stuck_since = 0.0
        self._free_bytes = 0
        self._backlog: deque[tuple[Kind, Parts]] = deque()
        self._life = select.poll()
        if pidfd is not None:
            self._life.register(pidfd, select.POLLIN)

    @property
    def is_stuck(self) -> bool:
        """Whether outputs wait for room, so that no more of them should be made."""
        return bool(self._backlog)

    @property
    def is_closing(self) -> bool:
        """Whether the front end said that it leaves."""
        return self.channel.is_client_closing

    def send(self, kind: Kind, parts: Parts) -> None:
        """Publish now or, behind what already waits, as soon as there is room."""
        if self._backlog or not self.channel.try_send(kind, *parts):
            if not self._backlog:
                self._stuck_since = time.monotonic()
                self._free_bytes = self.channel.outputs.free_bytes
            self._backlog.append((kind, parts))

    def has_room_again(self) -> bool:
        """Whether the front end has read since outputs last found no room."""
        return self.is_stuck and self.channel.outputs.free_bytes > self._free_bytes

    def flush(self) -> None:
        """Publish of what waits as much as there is room for."""
        while self._backlog:
            kind, parts = self._backlog[0]
            self._free_bytes = self.channel.outputs.free_bytes
            if not self.channel.try_send(kind, *parts):
                return
            self._backlog.popleft()
            self._stuck_since = time.monotonic()

    def ended(self) -> SessionEnd | None:
        """Whether, and why, the front end is done. Costs a system call."""
        if self.is_closing:
            return SessionEnd.CLOSED
        gone = self._life.poll(0) if self._pidfd is not None else not self._segment.is_owned()
        if gone:
            return SessionEnd.DIED
        if self._backlog and self._patience_s is not None:
            stuck_s = time.monotonic() - self._stuck_since
            return SessionEnd.TOO_SLOW if stuck_s > self._patience_s else None
        return None

    def close(self) -> None:
        self.channel.close()
        self._segment.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
