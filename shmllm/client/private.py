"""The client of a private engine, which a front end starts and which ends with it."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Sequence

from shmllm.client.channel_client import ChannelEngineClient
from shmllm.client.launch import ChildEngineHandle
from shmllm.client.protocol import NO_PROGRESS, StartProgress
from shmllm.config.engine import EngineConfig
from shmllm.config.info import EngineInfo
from shmllm.errors import EngineDeadError, EngineStartError
from shmllm.ipc.access import Access
from shmllm.ipc.client_bell import name_bell
from shmllm.ipc.client_channel import ClientChannel
from shmllm.ipc.output_waiter import OutputWaiter
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import EngineState, SegmentKind
from shmllm.ipc.stats import Stat
from shmllm.ipc.wait import WaitPolicy
from shmllm.wire import codec
from shmllm.wire.messages import PROTOCOL_VERSION, Failed, Hello, RecordKind, Text

CLOSE_GRACE_S = 5.0


class PrivateEngineClient(ChannelEngineClient):
    """Starts an engine process. `wait_ready` waits for it, so the caller can do other work first.

    Args:
        config: the configuration of the engine.
        startup_timeout_s: how many seconds the engine may take to become ready.
        shm_directory: a directory in the file system for the segments.
        waiter: waits for the outputs of this engine and of others; None: of this one only.

    Raises:
        NoSpaceError: the file system has no room for the segments.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        startup_timeout_s: float = 600.0,
        shm_directory: str = "/dev/shm",
        waiter: OutputWaiter | None = None,
    ) -> None:
        self._config = config
        self._startup_timeout_s = startup_timeout_s
        self._start_deadline = time.monotonic() + startup_timeout_s
        self._has_said_hello = False
        with contextlib.ExitStack() as undo:
            control = Segment.create(SegmentKind.CONTROL, directory=shm_directory)
            undo.callback(control.close)
            control.restrict(Access.FRONT_END)
            client = Segment.create(SegmentKind.CLIENT, directory=shm_directory)
            undo.callback(client.close)
            client.take_ownership()
            if waiter is not None:
                name_bell(client, waiter.segment, "")
            channel = ClientChannel(control, client, WaitPolicy.named("idle"), waiter)
            undo.callback(channel.close)
            bell_fds = () if waiter is None else (waiter.segment.fd,)
            engine = ChildEngineHandle((control.fd, client.fd), bell_fds)
            undo.pop_all()
        super().__init__(channel, engine)
        self._process = engine
        self._owner_pid = os.getpid()
        self._finalizer = weakref.finalize(
            self, _shut_down, os.getpid(), channel, engine, (control, client)
        )

    def poll_ready(self, progress: StartProgress = NO_PROGRESS) -> EngineInfo | None:
        if hasattr(self, "info"):
            return self.info
        try:
            return self._start_on(progress)
        except EngineDeadError as death:
            self.close()
            raise EngineStartError(
                f"the engine process ended while starting: {death.args[0]}",
                death.remote_traceback,
            ) from death
        except BaseException:
            self.close()
            raise

    def begin_stop(self) -> None:
        if not self._channel.is_closed and os.getpid() == self._owner_pid:
            _ask_to_end(self._channel, self._process)

    def stop(self) -> None:
        if not self._channel.is_closed:
            _end_engine(self._owner_pid, self._channel, self._process)

    def _start_on(self, progress: StartProgress) -> EngineInfo | None:
        message = self._take_startup()
        if message is None:
            self._report(progress)
        elif not self._has_said_hello:
            if not isinstance(message, Hello) or message.protocol_version != PROTOCOL_VERSION:
                raise EngineStartError(f"the engine answered {message!r} instead of HELLO")
            self._has_said_hello = True
            # A pool that nobody polled for long may hear of it late.
            self._start_deadline = time.monotonic() + self._startup_timeout_s
            self._send(RecordKind.INIT, codec.encode_text(Text(self._config.to_json())))
        elif isinstance(message, Failed):
            raise EngineStartError(message.message, message.traceback)
        elif not isinstance(message, Text):
            raise EngineStartError(f"the engine answered {message!r} instead of READY")
        else:
            info = self._become_ready(message)
            self.seed = info.seed
            return info
        return None

    def _report(self, progress: StartProgress) -> None:
        stages = (
            (progress.on_load, Stat.WEIGHT_BYTES_LOADED, Stat.WEIGHT_BYTES_TOTAL),
            (progress.on_capture, Stat.GRAPHS_CAPTURED, Stat.GRAPHS_TOTAL),
        )
        if self._has_said_hello:
            for on_progress, done, total in stages:
                if on_progress is not None and (in_all := self._channel.stat(total)):
                    on_progress(self._channel.stat(done), in_all)
        if time.monotonic() >= self._start_deadline:
            raise EngineStartError(
                f"the engine was not ready after {self._startup_timeout_s:g} s; a large "
                "model on a slow disk, or a GPU's first start, needs a larger startup_timeout"
            )


def _ask_to_end(channel: ClientChannel, engine: ChildEngineHandle) -> None:
    if not engine.wait(0):
        channel.set_closing()


def _end_engine(owner_pid: int, channel: ClientChannel, engine: ChildEngineHandle) -> None:
    if os.getpid() != owner_pid:
        return
    _ask_to_end(channel, engine)
    # An engine that still starts has nothing to clean up, and may be in an import that reacts to
    # nothing for seconds.
    engine.stop(0 if channel.engine_state is EngineState.STARTING else CLOSE_GRACE_S)


def _shut_down(
    owner_pid: int, channel: ClientChannel, engine: ChildEngineHandle, segments: Sequence[Segment]
) -> None:
    """Close the connection. A second call goes on where an exception ended the first one."""
    if os.getpid() != owner_pid:
        return
    if not channel.is_closed:
        _end_engine(owner_pid, channel, engine)
    channel.close()
    for segment in segments:
        segment.close()
