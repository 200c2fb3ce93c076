"""The parts of a segment that a process may write, by its role.

A process maps a segment read-only, and maps the pages that its role writes a second time. A store
outside of them then raises an error in the process with the fault, instead of damaging an engine.
"""

from __future__ import annotations

import mmap
import os
from enum import Enum

from shmllm.ipc.layout import CONTROL_HELLO_OFFSET, CONTROL_STOP_OFFSET, PAGE_BYTES


class Access(Enum):
    """The role of a process; the value holds the offsets of the pages that it may write.

    The values are sets: Python 3.11.2 replaces an empty tuple.

    ALL          the creator and the engine, which write the whole segment
    READER       tools; they write nothing
    FRONT_END    hello words and doorbell of a control segment
    OPERATOR     the same and the stop word: `shmllm engine stop`
    """

    ALL = None
    READER = frozenset[int]()
    FRONT_END = frozenset({CONTROL_HELLO_OFFSET})
    OPERATOR = frozenset({CONTROL_HELLO_OFFSET, CONTROL_STOP_OFFSET})

    @property
    def open_flags(self) -> int:
        """The flags for `os.open` of a file that is going to be mapped."""
        mode = os.O_RDWR if self is Access.ALL else os.O_RDONLY
        return mode | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class WritablePage:
    """A page of a segment, mapped a second time and writable.

    Args:
        fd: a descriptor of the segment's file, which may be open for reading only.
        offset: the byte offset of the page.

    Raises:
        OSError: the file cannot be opened for writing, or not be mapped.
    """

    __slots__ = ("_begin", "_buffer", "_end", "_mapping")

    def __init__(self, fd: int, offset: int) -> None:
        # A machine with larger pages maps, and therefore may write, more than this one page.
        self._begin = offset - offset % mmap.ALLOCATIONGRANULARITY
        self._end = offset + PAGE_BYTES
        writable = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._mapping = mmap.mmap(writable, self._end - self._begin, offset=self._begin)
        finally:
            os.close(writable)
        self._mapping.madvise(mmap.MADV_DONTDUMP)
        self._buffer = memoryview(self._mapping)

    def part(self, offset: int, nbytes: int) -> memoryview | None:
        """The bytes [offset, offset + nbytes) of the segment; None if the page lacks some."""
        if not self._begin <= offset <= offset + nbytes <= self._end:
            return None
        begin = offset - self._begin
        return self._buffer[begin : begin + nbytes]

    def close(self) -> None:
        """Unmap the page; BufferError if a view of it is in use."""
        self._buffer.release()
        self._mapping.close()


def map_file(fd: int, size: int, access: Access = Access.ALL) -> mmap.mmap:
    """Map a whole segment, read-only unless the role writes all of it. Raises OSError."""
    is_writable = access is Access.ALL
    mapping = mmap.mmap(
        fd, size, prot=mmap.PROT_READ | mmap.PROT_WRITE if is_writable else mmap.PROT_READ
    )
    # A core dump must not contain shared memory: the kernel delays the end of a crashed process
    # until its core dump is written.
    mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping


def map_pages(fd: int, access: Access) -> list[WritablePage]:
    """Map the pages that a role writes, besides `map_file`. Raises OSError."""
    return [WritablePage(fd, offset) for offset in sorted(access.value or ())]
