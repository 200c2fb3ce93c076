"""What all tests share: nothing of ours may outlive a test, and small real models.

The leak check runs around every test that starts processes: afterwards no process of
shmllm is left that was not there before, and /dev/shm holds what it held.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ENGINE_MODULE = "shmllm.engine.process"
LEAK_GRACE_S = 5.0


def engine_processes() -> set[int]:
    """Pids of engine processes of this user that are not zombies."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if ENGINE_MODULE.encode() in command:
            found.add(int(entry.name))
    return found


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails the test if it leaves an engine process or a file in /dev/shm."""
    processes, files = engine_processes(), set(os.listdir("/dev/shm"))
    yield
    deadline = time.monotonic() + LEAK_GRACE_S
    while (left := engine_processes() - processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"engine processes left: {left}"
    new_files = set(os.listdir("/dev/shm")) - files
    assert not new_files, f"files left in /dev/shm: {new_files}"
