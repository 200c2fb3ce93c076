"""Lets front ends of a named engine in, and sees them out.

A front end names its segment after a free place, writes its nonce into that place's hello
word and rings. The engine compares the hello table with what it saw last, opens the
segment of a changed place, and answers with the same nonce, or with a refusal.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from shmllm.engine.session import Session, SessionEnd
from shmllm.errors import IpcError
from shmllm.ipc import registry
from shmllm.ipc.control import ControlPage
from shmllm.ipc.layout import NUM_CLIENTS, Refusal, SegmentKind
from shmllm.ipc.liveness import open_pidfd
from shmllm.ipc.segment import Segment

REFUSALS = {SessionEnd.TOO_SLOW: Refusal.TOO_SLOW, SessionEnd.BROKEN: Refusal.BROKEN_PROTOCOL}


class ClientAcceptor:
    """
    Args:
        control: the engine's segment.
        page: its contents.
        path: the engine's name; None for a private engine, which lets nobody in.
        patience_s: how long outputs of a front end may find no room.
        on_dismissed: called with a place when its front end is gone, before the place can
            have another: the requests of the old one must not answer to the new one.

    Attributes:
        sessions: by place; the acceptor adds and removes.
    """

    def __init__(
        self,
        control: Segment,
        page: ControlPage,
        path: Path | None,
        patience_s: float,
        on_dismissed: Callable[[int], None],
    ) -> None:
        self._control = control
        self._page = page
        self._path = path
        self._patience_s = patience_s
        self._on_dismissed = on_dismissed
        self._seen = [0] * NUM_CLIENTS
        self.sessions: dict[int, Session] = {}

    def has_news(self) -> bool:
        """Whether a front end knocked since `admit_new`, or one is leaving."""
        return self._someone_knocked() or self.someone_leaves()

    def someone_leaves(self) -> bool:
        """Whether a front end said goodbye or broke the protocol; those that died are found
        by `dismiss_ended`."""
        return any(s.is_closing or s.broken is not None for s in self.sessions.values())

    def admit_new(self) -> Iterator[Session]:
        """Let in who knocked."""
        if not self._someone_knocked():
            return
        for place, nonce in enumerate(self._page.hellos()):
            if nonce == self._seen[place]:
                continue
            self._seen[place] = nonce
            if place in self.sessions:  # its last client died and the next came at once
                self.dismiss(self.sessions[place], Refusal.NOT_THERE)
            try:
                session = self._open(place, nonce)
            except IpcError:
                self._page.admit(place, Refusal.NOT_USABLE)
                continue
            self.sessions[place] = session
            self._page.admit(place, nonce)
            yield session

    def dismiss(self, session: Session, refusal: Refusal) -> None:
        """End a session; its place can be claimed again."""
        self._page.admit(session.place, refusal)
        del self.sessions[session.place]
        session.close()
        self._on_dismissed(session.place)
        if self._path is not None:
            registry.sweep(self._client_path(session.place))

    def dismiss_ended(self) -> None:
        """See out the front ends that closed, died or do not read."""
        ended = [(s, end) for s in self.sessions.values() if (end := s.ended()) is not None]
        for session, end in ended:
            if session.broken is not None and self._path is None:
                raise session.broken  # a private engine has nobody else to live for
            self.dismiss(session, REFUSALS.get(end, Refusal.NOT_THERE))

    def _someone_knocked(self) -> bool:
        return self._path is not None and self._page.hellos() != self._seen

    def _client_path(self, place: int) -> Path:
        assert self._path is not None
        return self._path.with_name(f"{self._path.name}.{place}")

    def _open(self, place: int, nonce: int) -> Session:
        path = self._client_path(place)
        segment = registry.attach(path, SegmentKind.CLIENT, f"the client in place {place}")
        with contextlib.ExitStack() as undo:
            undo.callback(segment.close)
            if segment.nonce != nonce:
                raise IpcError("the place changed hands")
            pidfd = open_pidfd(segment.creator_pid, segment.creator_pid_namespace)
            if pidfd is not None:
                undo.callback(os.close, pidfd)
            session = Session(place, self._control, segment, pidfd, self._patience_s)
            undo.pop_all()
        return session
