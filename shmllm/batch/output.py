"""The file that records go to: whole lines, at its end, by one process at a time.

Every record is one `write`, so what a killed job leaves is whole lines and at most one torn
line at the end; `DoneLines.read` finds where that begins.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from enum import Enum, auto

from shmllm.batch.sources import STANDARD_STREAM
from shmllm.errors import RequestError


class Mode(Enum):
    """What becomes of records that are there already."""

    NEW = auto()  # an error
    RESUME = auto()  # they stay
    OVERWRITE = auto()  # they go


class RecordFile:
    """
    Args:
        path: of the file, which is made if it is not there; - is stdout.
        mode: looked at here, where nothing is changed yet.

    Raises:
        RequestError: it holds something and `mode` is NEW, or another job writes to it.
        OSError: it cannot be opened.
    """

    def __init__(self, path: str, mode: Mode) -> None:
        self.path = path
        self._has_begun = False
        self._fd, self._is_ours = _open(path)
        self._is_regular = stat.S_ISREG(os.fstat(self._fd).st_mode) and path != STANDARD_STREAM
        self._size = 0
        try:
            if self._is_regular:
                self._claim(mode)
        except BaseException:
            self.close()
            raise

    def begin(self, size: int) -> None:
        """Keep this many bytes, which are whole lines, and write behind them."""
        if self._is_regular:
            os.ftruncate(self._fd, size)
        self._size = size
        self._has_begun = True

    def write(self, line: bytes) -> None:
        """Add a line; a failure in the middle of it leaves none of it in a regular file."""
        assert self._has_begun
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            self._size += len(line)
        except BaseException:
            if self._is_regular:
                os.ftruncate(self._fd, self._size)
            raise

    def sync(self) -> None:
        """Everything written is on the disk."""
        with contextlib.suppress(OSError):
            os.fsync(self._fd)

    def close(self) -> None:
        """A file that was made for a job which did not begin goes."""
        if self._is_ours and not self._has_begun:
            os.unlink(self.path)
        os.close(self._fd)

    def _claim(self, mode: Mode) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise RequestError(f"another job is writing to {self.path}") from error
        if mode is Mode.NEW and os.fstat(self._fd).st_size:
            raise RequestError(
                f"{self.path} is not empty; --resume goes on with it, --overwrite starts anew"
            )


def _open(path: str) -> tuple[int, bool]:
    """A descriptor, and whether the file was made for it."""
    if path == STANDARD_STREAM:
        return os.dup(1), False
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    with contextlib.suppress(FileExistsError):
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666), True
    return os.open(path, flags), False
