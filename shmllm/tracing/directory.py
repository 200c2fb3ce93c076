"""The directory of one trace: who records finds it, and sees in it whether to go on.

Owns the agreement between the process that wants a trace and those that record. The
owner's lock on the directory says that the trace is wanted; the kernel drops it at any
death, and those who record look at it now and then. So nobody has to be told of an end.
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
YOUNG_S = 10.0


@dataclass(frozen=True)
class Settings:
    """
    Attributes:
        most_bytes: what each process may record; later records are counted and dropped.
        until_ns: when recording ends, on CLOCK_MONOTONIC; 0 for when the owner ends it.
    """

    most_bytes: int = DEFAULT_BYTES
    until_ns: int = 0


class OwnedDirectory:
    """A trace as its owner sees it: made with it, and taken away by `close`.

    Args:
        settings: for those who record.
        parent: where it lies; None for the temporary directory.
    """

    def __init__(self, settings: Settings, parent: Path | None = None) -> None:
        sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        (self.path / SETTINGS).write_text(json.dumps(asdict(settings)))

    def close(self) -> None:
        """The trace is over, and its recordings are gone; idempotent."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


class SharedDirectory:
    """A trace as one who records sees it.

    Raises:
        OSError: it is not there, or not ours.
        ValueError: it is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings = Settings(**json.loads((path / SETTINGS).read_text()))
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def is_wanted(self) -> bool:
        """Whether the owner lives and wants more. Two system calls."""
        return not _is_free(self._fd)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def sweep(parent: Path | None = None) -> None:
    """Remove what owners left that were killed."""
    for path in Path(parent or tempfile.gettempdir()).glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # A young one may be between its making and its lock.
                is_old = time.time() - os.fstat(fd).st_mtime > YOUNG_S
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
