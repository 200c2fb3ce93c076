"""The file that a batch job writes records to: whole lines, appended by one process at a time.

Every record is one `write`. A killed job therefore leaves whole lines and at most one incomplete
line at the end; `DoneLines.read` finds where the incomplete line begins.
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

_NO_DISK = (errno.EINVAL, errno.ENOTSUP, errno.EROFS)
"""The errors of `fsync` for pipes and devices, which have no disk behind them."""


class Mode(Enum):
    """What to do if the output already holds records."""

    NEW = auto()  # raise an error
    RESUME = auto()  # keep them
    OVERWRITE = auto()  # remove them


class RecordFile:
    """Opens and locks the output without changing its content; `begin` makes it writable.

    Args:
        path: the file, which is created if it does not exist; - is stdout.
        mode: what to do with existing content.

    Raises:
        RequestError: the file is not empty and `mode` is NEW, or another job writes to the file.
        OSError: the file cannot be opened.
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
        """Truncates the file to `size` bytes, which hold whole lines, and allows writing."""
        if self._is_regular:
            os.ftruncate(self._fd, size)
        self._size = size
        self._has_begun = True

    def write(self, line: bytes) -> None:
        """Appends a line. If this fails in the middle, a regular file keeps no part of the line.

        Raises:
            OSError: the line cannot be written; the error names the file.
        """
        assert self._has_begun
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
            self._size += len(line)
        except BaseException as error:
            if self._is_regular:
                os.ftruncate(self._fd, self._size)
            self._name_file(error)
            raise

    def sync(self) -> None:
        """Waits until all written records are on the disk.

        Raises:
            OSError: records are lost: a file system may report a full disk only here.
        """
        try:
            os.fsync(self._fd)
        except OSError as error:
            if error.errno not in _NO_DISK:
                self._name_file(error)
                raise

    def close(self) -> None:
        """Closes the file, and removes it if this object created it and the job did not begin."""
        if self._is_ours and not self._has_begun:
            os.unlink(self.path)
        os.close(self._fd)

    def _name_file(self, error: BaseException) -> None:
        if isinstance(error, OSError) and self.path != STANDARD_STREAM:
            error.filename = self.path

    def _claim(self, mode: Mode) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise RequestError(f"another job is writing to {self.path}") from error
        if mode is Mode.NEW and os.fstat(self._fd).st_size:
            raise RequestError(
                f"{self.path} is not empty; --resume continues it, --overwrite replaces it"
            )


def _open(path: str) -> tuple[int, bool]:
    """Opens the file; returns its descriptor and whether this call created it."""
    if path == STANDARD_STREAM:
        return os.dup(1), False
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    with contextlib.suppress(FileExistsError):
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666), True
    return os.open(path, flags), False
