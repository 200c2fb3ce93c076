"""The client of a named engine, which runs before and after this front end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import weakref
from pathlib import Path
from typing import NoReturn

from shmllm.client.channel_client import ChannelEngineClient
from shmllm.client.protocol import NO_PROGRESS, StartProgress
from shmllm.config.info import EngineInfo
from shmllm.errors import EngineDeadError, EngineStartError, SegmentError
from shmllm.ipc import registry
from shmllm.ipc.access import Access
from shmllm.ipc.client_bell import name_bell
from shmllm.ipc.client_channel import ClientChannel
from shmllm.ipc.control import ControlView
from shmllm.ipc.error_log import reason_for
from shmllm.ipc.liveness import open_pidfd, wait_for_end
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import Answer, EngineState, SegmentKind
from shmllm.ipc.wait import WaitPolicy
from shmllm.wire.messages import Text

ACCEPT_TIMEOUT_S = 5.0
_STOPPED = "engine {!r} was stopped by `shmllm engine stop`"
_ANSWERS = {
    Answer.NOT_CONNECTED: "the engine ended the connection",
    Answer.TOO_SLOW: "the engine disconnected this front end: it did not read its outputs in time",
    Answer.BROKEN_PROTOCOL: "the engine disconnected this front end: it sent invalid messages",
    Answer.NOT_USABLE: "the engine could not open this front end's segment, or the segment was "
    "truncated, or it has holes while shared memory is full",
}


class NamedEngineHandle:
    """The `EngineHandle` of an engine that is not a child process.

    It checks the ownership lock of the engine's segment, and the pidfd of the engine's process if
    that is in the same pid namespace.
    """

    def __init__(self, control: Segment, view: ControlView) -> None:
        self._control = control
        self.pid = view.engine_pid
        self._pidfd = open_pidfd(self.pid, view.engine_pid_namespace)

    def wait(self, timeout_s: float) -> bool:
        if self._pidfd is not None and wait_for_end(self._pidfd, timeout_s):
            return True
        return not self._control.is_owned()

    @property
    def can_kill(self) -> bool:
        """Whether the process is in this pid namespace. `wait` returns at once if it is not."""
        return self._pidfd is not None

    def exit_status(self) -> tuple[int | None, int | None]:
        return None, None

    def kill(self) -> None:
        """Kill the process, if `can_kill`. It is the engine, because the ownership lock was seen
        held after its pidfd was opened: an earlier `wait` returned False."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        if self._pidfd is not None:
            pidfd, self._pidfd = self._pidfd, None
            os.close(pidfd)


class AttachedEngineClient(ChannelEngineClient):
    """
    Args:
        name: the name of the engine.
        directory: the directory of the named segments; None for this user's folders.
        leader: a client that is attached to another engine, whose doorbell wakes this one, too.

    Raises:
        SegmentError: the engine does not exist, still starts, has died, belongs to another user,
            or has no free place.
        ProtocolMismatchError: the engine has another version.
        NoSpaceError: there is no room for this front end's segment.

    Attributes:
        segment_name: the name of this front end's segment at the engine.
    """

    segment_name: str

    def __init__(
        self,
        name: str,
        directory: Path | None = None,
        leader: AttachedEngineClient | None = None,
    ) -> None:
        self._name = name
        self._owner_pid = os.getpid()
        path = registry.control_path(name, directory)
        with contextlib.ExitStack() as undo:
            control = registry.attach(
                path, SegmentKind.CONTROL, f"engine {name!r}", Access.FRONT_END
            )
            undo.callback(control.close)
            self._view = ControlView(control)
            undo.callback(self._view.close)
            _check_ready(name, self._view)
            engine = NamedEngineHandle(control, self._view)
            undo.callback(engine.close)
            client = Segment.create(SegmentKind.CLIENT, directory=str(path.parent))
            undo.callback(client.close)
            client.take_ownership()
            if leader is not None:
                name_bell(client, leader.waiter.segment, leader.segment_name)
            self._place = registry.claim_place(client, name, path.parent)
            client_path = registry.client_path(name, self._place, path.parent)
            undo.callback(registry.withdraw, client, client_path)
            waiter = None if leader is None else leader.waiter
            channel = ClientChannel(control, client, WaitPolicy.named("idle"), waiter)
            undo.callback(channel.close)
            self.segment_name = client_path.name
            self._nonce = client.nonce
            self._attached_ns = time.time_ns()
            self._accept_deadline: float | None = None
            super().__init__(channel, engine)
            segments = (control, client)
            self._finalizer = weakref.finalize(
                self, _detach, os.getpid(), channel, self._view, engine, segments, client_path
            )
            undo.pop_all()

    def poll_ready(self, progress: StartProgress = NO_PROGRESS) -> EngineInfo | None:
        if hasattr(self, "info"):
            return self.info
        try:
            return self._ask_to_be_accepted()
        except EngineDeadError as death:
            self.close()
            raise EngineStartError(f"engine {self._name!r} has ended: {death.args[0]}") from death
        except BaseException:
            self.close()
            raise

    def _ask_to_be_accepted(self) -> EngineInfo | None:
        if self._accept_deadline is None:
            self._accept_deadline = time.monotonic() + ACCEPT_TIMEOUT_S
            self._channel.say_hello(self._place, self._nonce)
        ready = self._take_startup()
        if isinstance(ready, Text):
            return self._become_ready(ready)
        if ready is not None:
            raise EngineStartError(f"the engine answered {ready!r} instead of READY")
        self._channel.repeat_hello(self._place, self._nonce)
        answer = self._view.answer(self._place, self._nonce)
        if answer not in (None, Answer.ACCEPTED):
            reason = self._logged_reason()
            raise EngineStartError(
                f"engine {self._name!r}: {_ANSWERS[answer]}" + (f": {reason}" if reason else "")
            )
        if time.monotonic() >= self._accept_deadline:
            raise EngineStartError(
                f"engine {self._name!r} did not answer in {ACCEPT_TIMEOUT_S:g} s; "
                "see: shmllm engine ls"
            )
        return None

    def begin_stop(self) -> None:
        if not self._channel.is_closed and os.getpid() == self._owner_pid:
            self._channel.set_closing()

    def stop(self) -> None:
        self.begin_stop()

    def _check_alive(self, call: int | None = None) -> None:
        super()._check_alive(call)
        if not self._has_unread(call):
            self._check_accepted()

    def make_room(self) -> None:
        super().make_room()
        self._check_accepted()

    def _check_accepted(self) -> None:
        answer = self._view.answer(self._place, self._nonce)
        # Any other value ends the connection: the engine may have refused somebody else since.
        if answer is not Answer.ACCEPTED and hasattr(self, "info"):
            message = _ANSWERS[answer or Answer.NOT_CONNECTED]
            if reason := self._logged_reason():
                message = f"the engine disconnected this front end: {reason}"
            raise EngineDeadError(message)

    def _logged_reason(self) -> str:
        """Why the engine cut off or refused this front end; "" if its error log does not say."""
        return reason_for(self._view.errors(), os.getpid(), self._place, self._attached_ns)

    def _raise_death(self) -> NoReturn:
        if self._view.is_stop_requested:
            raise EngineDeadError(_STOPPED.format(self._name))
        super()._raise_death()


def _check_ready(name: str, view: ControlView) -> None:
    state = view.engine_state
    if state is EngineState.STARTING:
        raise SegmentError(f"engine {name!r} is still starting; see: shmllm engine ls")
    if view.is_stop_requested:
        raise SegmentError(f"engine {name!r} is being stopped by `shmllm engine stop`")
    if state is not EngineState.READY:
        lines = view.last_words().strip().splitlines()
        cause = f": {lines[-1]}" if lines else ""
        raise SegmentError(f"engine {name!r} is {view.describe()}{cause}")


def _detach(
    owner_pid: int,
    channel: ClientChannel,
    view: ControlView,
    engine: NamedEngineHandle,
    segments: tuple[Segment, Segment],
    client_path: Path,
) -> None:
    """Close the connection. A second call goes on where an exception ended the first one."""
    if os.getpid() != owner_pid:
        return
    control, client = segments
    if not channel.is_closed:
        channel.set_closing()
    if client.is_usable:
        registry.withdraw(client, client_path)
    channel.close()
    view.close()
    engine.close()
    client.close()
    control.close()
