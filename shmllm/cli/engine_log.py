"""The log of a detached engine: what it writes to stdout and stderr.

A log lies in this user's folder in the temporary directory, which no other user can enter
(`ipc/folder.py`), so nobody can put a link to another file in its place. It does not lie in
/dev/shm, where it would take memory. It stays after the engine's end, because it may contain the
reason. The next start of the same name appends to it; a start that finds more than LARGEST_BYTES
empties it first, so repeated starts cannot fill the disk. Its removal is left to the user and to
the system's cleaning of temporary files. This module knows nothing about a log that the user named.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

from shmllm.errors import SegmentError
from shmllm.ipc import folder

LARGEST_BYTES = 2**20
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_log(name: str) -> tuple[Path, BinaryIO]:
    """Open the log of engine `name` for appending, readable only for this user.

    Returns:
        Its path and the file. The caller closes the file.

    Raises:
        SegmentError: the folder cannot be created, or the log is no regular file.
    """
    path = folder.make(Path(tempfile.gettempdir())) / f"{name}.log"
    with folder.opened(path.parent) as directory:
        try:
            fd = os.open(path.name, _FLAGS, 0o600, dir_fd=directory)
        except OSError as error:
            raise SegmentError(f"cannot open the log {path}: {error.strerror}") from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(fd)
        raise SegmentError(f"cannot open the log {path}: it is no regular file of this user")
    os.fchmod(fd, 0o600)
    if status.st_size > LARGEST_BYTES:
        os.ftruncate(fd, 0)
    return path, open(fd, "ab")
