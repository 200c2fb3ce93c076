"""A file of a checkpoint that is mapped for reading.

Another process may truncate the file at any time, after which the mapping reads as zeros in a
process with the handler of `sigbus`. This module must not know what files contain.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import IO

from shmllm.errors import EngineStartError
from shmllm.sigbus import bus_guard


class MappedFile:
    """
    Args:
        file: the open file.
        path: what messages call it.

    Attributes:
        content: its bytes. A map is closed by its last reference: closing it fails while tensors
            point into it.

    Raises:
        EngineStartError: it cannot be mapped.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        try:
            # A private mapping counts as writable, without which torch warns.
            self.content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise EngineStartError(f"cannot read {path}: {error}") from None
        self._path = path
        self._guard = bus_guard.guard(self.content)

    def finish(self, begin: int, num_bytes: int) -> None:
        """Releases the pages that contain nothing but the bytes [begin, begin + num_bytes), which
        were read.

        Raises:
            EngineStartError: the file's memory was lost, because the file has become too short or
                its disk has an error.
        """
        if self._guard is not None and self._guard.is_lost:
            raise EngineStartError(f"cannot read {self._path}: {os.strerror(errno.EIO)}")
        page = mmap.PAGESIZE
        first, end = -(-begin // page) * page, (begin + num_bytes) // page * page
        if end > first:
            self.content.madvise(mmap.MADV_DONTNEED, first, end - first)
