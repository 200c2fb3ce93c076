"""Accepts the front ends of a named engine, and dismisses them when they end.

To attach, a front end names its segment after a free place, writes its nonce into that place's
hello word and rings the engine's doorbell. The engine compares the hello words with the ones it saw
last, opens the segment of each changed place, and answers that nonce.

Every front end can write every hello word. So the engine believes a hello only if the segment in
that place has the same nonce, and it never ends a session because of a hello alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from shmllm.engine.session import Session, SessionEnd
from shmllm.errors import IpcError, SegmentError
from shmllm.ipc import error_log, registry
from shmllm.ipc.access import Access
from shmllm.ipc.client_bell import bell_of
from shmllm.ipc.control import ControlPage
from shmllm.ipc.layout import NUM_CLIENTS
from shmllm.ipc.liveness import open_pidfd
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import Answer, SegmentKind

ANSWERS = {
    SessionEnd.TOO_SLOW: Answer.TOO_SLOW,
    SessionEnd.BROKEN_PROTOCOL: Answer.BROKEN_PROTOCOL,
    SessionEnd.LOST_MEMORY: Answer.NOT_USABLE,
}


class ClientAcceptor:
    """
    Args:
        control: the engine's segment.
        page: the control page in that segment.
        path: the path of the segment's name; None for a private engine, which accepts no more
            front ends.
        timeout_s: how many seconds a front end's output ring may stay full, or a front end that
            holds up others may be stopped, before the engine dismisses the front end.
        on_dismissed: called with the place of a dismissed front end, before another front end can
            take it: the new front end must not receive outputs of the old one's requests.
        holds_up_others: tells whether other front ends wait for the one in a place.

    Attributes:
        sessions: the sessions by place. The acceptor adds and removes them.
    """

    def __init__(
        self,
        control: Segment,
        page: ControlPage,
        path: Path | None,
        timeout_s: float,
        on_dismissed: Callable[[int], None],
        holds_up_others: Callable[[int], bool],
    ) -> None:
        self._control = control
        self._page = page
        self._path = path
        self._timeout_s = timeout_s
        self._on_dismissed = on_dismissed
        self._holds_up_others = holds_up_others
        self._last_hellos = [0] * NUM_CLIENTS
        self._last_served = [0] * NUM_CLIENTS
        self._unswept: set[int] = set()  # the places whose names outlive their sessions
        self.sessions: dict[int, Session] = {}

    def has_pending(self) -> bool:
        """Whether a front end asked to attach since the last `accept_new`, or one is leaving."""
        return self._has_new_hello() or self.has_leaving()

    def has_leaving(self) -> bool:
        """Whether a front end is closing or broke the protocol. `dismiss_ended` also finds front
        ends that died."""
        return any(s.is_closing or s.protocol_error is not None for s in self.sessions.values())

    def accept_new(self) -> Iterator[Session]:
        """Accept the front ends that asked to attach, and yield their sessions."""
        if not self._has_new_hello():
            return
        for place, nonce in enumerate(self._page.hellos()):
            if nonce == self._last_hellos[place]:
                continue
            self._last_hellos[place] = nonce
            if nonce == self._last_served[place]:
                continue  # a wrong store repeats the hello of a session, which may have ended
            if (last := self.sessions.get(place)) is not None:
                if (end := self._ended(last)) is None:
                    continue  # no front end can take the place of one that lives
                self._dismiss_ended(last, end)
            try:
                session = self._open(place, nonce)
            except IpcError as error:
                self._page.errors.record(error_log.refused(place, str(error)), place)
                self._page.answer(place, nonce, Answer.NOT_USABLE)
                continue
            if session is None:
                continue
            self.sessions[place] = session
            self._last_served[place] = nonce
            self._page.answer(place, nonce, Answer.ACCEPTED)
            yield session

    def dismiss(self, session: Session, answer: Answer) -> None:
        """End a session. Another front end can then take its place."""
        self._page.answer(session.place, session.nonce, answer)
        del self.sessions[session.place]
        session.close()
        self._on_dismissed(session.place)
        self._unswept.add(session.place)
        self._sweep()

    def dismiss_ended(self) -> None:
        """Dismiss the front ends that closed, died, or do not read their outputs."""
        self._sweep()
        ended = [(s, end) for s in self.sessions.values() if (end := self._ended(s)) is not None]
        for session, end in ended:
            error = session.error
            if error is not None and self._path is None:
                raise error  # a private engine has no other front end
            self._dismiss_ended(session, end)

    def _sweep(self) -> None:
        """Remove the names of dismissed front ends that have ended. One that is stopped still has
        its own, which nobody would remove after its end."""
        for place in [*self._unswept]:
            is_over = place in self.sessions or self._path is None
            if is_over or registry.sweep(self._client_path(place)):
                self._unswept.discard(place)

    def _dismiss_ended(self, session: Session, end: SessionEnd) -> None:
        if reason := session.reason_of(end):
            text = error_log.cut_off(session.pid, session.place, reason)
            self._page.errors.record(text, session.place)
        self.dismiss(session, ANSWERS.get(end, Answer.NOT_CONNECTED))

    def _ended(self, session: Session) -> SessionEnd | None:
        return session.ended(self._holds_up_others(session.place))

    def _has_new_hello(self) -> bool:
        return self._path is not None and self._page.hellos() != self._last_hellos

    def _client_path(self, place: int) -> Path:
        assert self._path is not None
        return self._path.with_name(f"{self._path.name}.{place}")

    def _open(self, place: int, nonce: int) -> Session | None:
        """The session with the front end in a place; None if that one did not say this hello.
        Raises IpcError if its segment cannot be used."""
        what = f"the client in place {place}"
        segment = registry.attach(self._client_path(place), SegmentKind.CLIENT, what, Access.ALL)
        with contextlib.ExitStack() as undo:
            undo.callback(segment.close)
            if segment.nonce != nonce:
                return None
            pidfd = open_pidfd(segment.creator_pid, segment.creator_pid_namespace)
            if pidfd is not None:
                undo.callback(os.close, pidfd)
            bell = self._open_bell(segment)
            if bell is not None:
                undo.callback(bell.close)
            session = Session(place, self._control, segment, pidfd, self._timeout_s, bell)
            session.on_error = self._page.errors.record
            undo.pop_all()
        return session

    def _open_bell(self, client: Segment) -> Segment | None:
        """The segment whose doorbell wakes the front end of another one. Raises IpcError if it
        cannot be used."""
        named = bell_of(client)
        if named is None:
            return None
        nonce, name = named
        assert self._path is not None
        path = registry.client_path_named(name, self._path.parent)
        bell = registry.attach(path, SegmentKind.CLIENT, f"the doorbell {name!r}", Access.ALL)
        if bell.nonce != nonce or bell.creator_pid != client.creator_pid:
            bell.close()
            raise SegmentError(f"{name!r} is not the segment of the front end's doorbell")
        return bell
