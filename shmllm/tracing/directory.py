"""The directory of one trace, in which processes write their recordings.

This module owns the protocol between the owner of a trace and the recording processes. The owner
holds a lock on the directory as long as it wants the trace. The kernel frees the lock when the
owner ends in any way. Recording processes test the lock regularly, so no message has to tell them
that the trace is over.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "SHMLLM_TRACE"
PREFIX = "shmllm-trace-"
SETTINGS = "settings.json"
DEFAULT_BYTES = 64 * 1024 * 1024
MIN_AGE_S = 10.0


@dataclass(frozen=True)
class Settings:
    """The settings of a trace, which the directory contains as JSON.

    Attributes:
        most_bytes: the largest recording of one process; further records are counted and dropped.
        until_ns: the time on CLOCK_MONOTONIC at which recording ends; 0: the owner ends it.
    """

    most_bytes: int = DEFAULT_BYTES
    until_ns: int = 0


class OwnedDirectory:
    """The owner's side of a trace's directory. The constructor creates and locks the directory,
    `close` removes it.

    Args:
        settings: the settings for recording processes.
        parent: the parent directory; None for the system's temporary directory.
    """

    def __init__(self, settings: Settings, parent: Path | None = None) -> None:
        sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        (self.path / SETTINGS).write_text(json.dumps(asdict(settings)))

    def close(self) -> None:
        """End the trace and delete its recordings; idempotent."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


class SharedDirectory:
    """A recording process's side of a trace's directory.

    Args:
        path: the path of the directory.

    Attributes:
        settings: the settings of the trace.

    Raises:
        OSError: the directory does not exist, or this process may not read it.
        ValueError: the path is no directory of a trace.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings = Settings(**json.loads((path / SETTINGS).read_text()))
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def is_wanted(self) -> bool:
        """Whether the owner is alive and still wants the trace. This costs two system calls."""
        return not _is_free(self._fd)

    def close(self) -> None:
        """Close the directory's descriptor; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def sweep(parent: Path | None = None) -> None:
    """Remove the directories of traces whose owners were killed."""
    for path in Path(parent or tempfile.gettempdir()).glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # The owner of a new directory may not have locked it yet.
                is_old = time.time() - os.fstat(fd).st_mtime > MIN_AGE_S
                if is_old and os.fstat(fd).st_uid == os.getuid() and _is_free(fd):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)


def _is_free(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True
