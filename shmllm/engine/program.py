"""Runs an engine in this process, private or named, as its command line says.

A private engine serves the front end that started it, through inherited descriptors, and ends with
it. A named engine serves any number of front ends of the same user until it is stopped.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys

from shmllm.config.engine import EngineConfig
from shmllm.engine import garbage
from shmllm.engine.process import EXIT_FAILED_START, EngineProcess
from shmllm.engine.session import Session
from shmllm.errors import SegmentError, ShmLLMError
from shmllm.ipc import registry
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import SegmentKind
from shmllm.sigbus import bus_guard


def _run_private(
    control_fd: int, client_fd: int, front_end_pidfd: int, bell_fd: int | None = None
) -> int:
    control = Segment.attach(control_fd, SegmentKind.CONTROL)
    client = Segment.attach(client_fd, SegmentKind.CLIENT)
    bell = None if bell_fd is None else Segment.attach(bell_fd, SegmentKind.CLIENT)
    os.set_inheritable(front_end_pidfd, False)
    session = Session(0, control, client, front_end_pidfd, timeout_s=None, bell=bell)
    return EngineProcess(control, path=None).run_private(session)


def _run_named(name: str, config: EngineConfig) -> int:
    _log_to_stderr()
    path = registry.control_path(name)
    control = Segment.create(SegmentKind.CONTROL)
    engine = EngineProcess(control, path, config.client)
    if not registry.publish(control, path):
        raise SegmentError(f"engine {name!r} is already running; stop it, or take another name")
    return engine.run_named(config)


def _log_to_stderr() -> None:
    """Show the messages of shmllm's loggers on stderr, which is a named engine's log.

    A private engine shares its front end's stderr and reports everything in its replies.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    logger = logging.getLogger("shmllm")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def run(arguments: list[str]) -> int:
    """Run the engine that the arguments of `python -m shmllm.engine` describe. Returns the exit
    code."""
    if sys.stderr is not None:
        faulthandler.enable()
    bus_guard.install()
    garbage.disable()
    mode, *rest = arguments
    try:
        if mode == "--private":
            return _run_private(*map(int, rest))
        return _run_named(rest[0], EngineConfig.from_json(rest[1]))
    except ShmLLMError as error:
        print(f"shmllm: {error}", file=sys.stderr)
        return EXIT_FAILED_START
