"""Stops a named engine from outside, whatever it does.

The stop word in the control segment asks the engine to end. It needs no place among the front ends,
and an engine that loads or computes finds it afterwards. An engine that does not end in time is
killed: the process that holds the ownership lock, through a pidfd that was opened before that lock
was checked.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path

from shmllm.client.attached import NamedEngineHandle
from shmllm.errors import SegmentError
from shmllm.ipc import registry
from shmllm.ipc.access import Access
from shmllm.ipc.control import ControlView
from shmllm.ipc.core_waiter import core_doorbell
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import SegmentKind

WAIT_S = 0.1
KILL_PATIENCE_S = 10.0


class StopResult(Enum):
    """
    ENDED         the engine ended by itself
    KILLED        the engine did not end in time and was killed
    UNREACHABLE   the engine runs on in another pid namespace, where nobody here can kill it
    UNKILLABLE    the engine was killed, but the kernel has not ended it yet
    """

    ENDED = auto()
    KILLED = auto()
    UNREACHABLE = auto()
    UNKILLABLE = auto()


def stop_engine(
    name: str,
    drain_s: float,
    timeout_s: float,
    on_wait: Callable[[float], None],
    directory: Path | None = None,
) -> tuple[StopResult, int]:
    """End a named engine and remove its names.

    Args:
        name: the name of the engine.
        drain_s: how many seconds its requests may take to end.
        timeout_s: how many seconds after `drain_s` the engine may take to end by itself.
        on_wait: called every WAIT_S seconds during that time with the seconds that are left.
        directory: the directory of the named segments; None for this user's folders.

    Returns:
        (the result, the engine's pid in its own pid namespace)

    Raises:
        SegmentError: the engine does not exist, has died, or belongs to another user.
        ProtocolMismatchError: the engine has another version.
    """
    path = registry.control_path(name, directory)
    with contextlib.ExitStack() as stack:
        control = registry.attach(path, SegmentKind.CONTROL, f"engine {name!r}", Access.OPERATOR)
        stack.callback(control.close)
        view = ControlView(control)
        stack.callback(view.close)
        engine = NamedEngineHandle(control, view)
        stack.callback(engine.close)
        if engine.wait(0):
            raise SegmentError(f"engine {name!r} has ended just now")
        _request(control, view, drain_s)
        result = _await_end(engine, drain_s + timeout_s, on_wait)
        if result in (StopResult.ENDED, StopResult.KILLED):
            for entry in registry.names(directory):
                if entry.engine == name:
                    registry.sweep(entry.path)
        return result, engine.pid


def _request(control: Segment, view: ControlView, drain_s: float) -> None:
    doorbell = core_doorbell(control)
    view.request_stop(drain_s)
    doorbell.post()
    doorbell.close()


def _await_end(
    engine: NamedEngineHandle, timeout_s: float, on_wait: Callable[[float], None]
) -> StopResult:
    deadline = time.monotonic() + timeout_s
    while not engine.wait(WAIT_S):
        if (left_s := deadline - time.monotonic()) <= 0:
            break
        on_wait(left_s)
        if not engine.can_kill:
            time.sleep(WAIT_S)
    else:
        return StopResult.ENDED
    if not engine.can_kill:
        return StopResult.UNREACHABLE
    engine.kill()
    return StopResult.KILLED if engine.wait(KILL_PATIENCE_S) else StopResult.UNKILLABLE
