"""Calls on addresses and files, for which Python has no function."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

NO_ACCESS = 0
RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
"""The flags of addresses that take no memory."""
POPULATE_READ, POPULATE_WRITE = 22, 23
"""Advice of Linux 5.14: take the page faults of a range now. Older kernels refuse it."""
_MAP_FIXED = 0x10
_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def map_memory(
    size: int, access: int, flags: int, fd: int = -1, offset: int = 0, *, at: int | None = None
) -> int:
    """Map memory, or a file. Returns the address.

    Args:
        size: in bytes.
        access: mmap.PROT_READ and mmap.PROT_WRITE, or NO_ACCESS.
        flags: those of mmap(2).
        fd, offset: the file, and the begin of the part of it.
        at: the address, where it replaces what is mapped; None: any.

    Raises:
        OSError: the system refuses.
    """
    fixed = 0 if at is None else _MAP_FIXED
    found: int = _libc.mmap(at, size, access, flags | fixed, fd, offset)
    if found == _FAILED:
        raise _problem("mmap")
    return found


def unmap_memory(address: int, size: int) -> None:
    """End a mapping."""
    _libc.munmap(address, size)


def protect(address: int, size: int, access: int) -> None:
    """Change the access to mapped memory. Raises OSError if the system refuses."""
    if _libc.mprotect(address, size, access):
        raise _problem("mprotect")


def advise(address: int, size: int, advice: int) -> None:
    """Advise the kernel of what is done with mapped memory; a refusal changes nothing."""
    _libc.madvise(address, size, advice)


def is_writable(fd: int) -> bool:
    """Whether a file is open for writing."""
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY


def free_part(fd: int, offset: int, size: int) -> None:
    """Free the memory of a part of a file, which reads as zeros then; a refusal keeps it."""
    _libc.fallocate(fd, _PUNCH_HOLE, offset, size)


def _problem(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), call)
