"""Access to named engines: a client's connection, and the control segment alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shmllm.client.attached import AttachedEngineClient
    from shmllm.ipc.segment import Segment
    from shmllm.ipc.states import EngineState


@contextlib.contextmanager
def attached_client(name: str) -> Iterator[AttachedEngineClient]:
    """Connects to the engine called `name`, and disconnects at the end of the `with` block.

    The client loads no tokenizer.
    """
    from shmllm.client.attached import AttachedEngineClient

    client = AttachedEngineClient(name)
    try:
        client.wait_ready()
        yield client
    finally:
        client.close()


def attach_control(path: Path, pid: int) -> Segment | None:
    """Maps the control segment at `path`.

    Returns:
        The segment; None while it does not exist or process `pid` is not its engine.
    """
    from shmllm.errors import IpcError
    from shmllm.ipc import registry
    from shmllm.ipc.control import ControlView
    from shmllm.ipc.states import SegmentKind

    try:
        control = registry.attach(path, SegmentKind.CONTROL, "the engine")
    except IpcError:
        return None
    view = ControlView(control)
    is_owner = view.engine_pid == pid
    view.close()
    if is_owner:
        return control
    control.close()
    return None


def engine_state(path: Path, pid: int) -> EngineState | None:
    """The state of the engine at `path`; None in the cases of `attach_control`."""
    from shmllm.ipc.control import ControlView

    control = attach_control(path, pid)
    if control is None:
        return None
    with control:
        view = ControlView(control)
        try:
            return view.engine_state
        finally:
            view.close()
