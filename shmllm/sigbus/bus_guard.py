"""Keeps a process alive when the file behind a mapping becomes too short, or gets a hole that has
no memory left.

The kernel answers an access to such a page with SIGBUS, and any process that may write to the file
can cause that at any time, so no check before the access helps. After `install`, the handler
replaces the protected memory by private zeros and the interrupted instruction continues. The owner
of the mapping asks `Guard.is_lost` and gives the mapping up. This module must not know what the
mappings contain.

Only shmllm's own programs call `install`; the process of a user keeps its signals. The other
SIGBUS of the process have the same effect as without a handler, with the traceback of
`faulthandler` if that was enabled before.

A mapping that the kernel reads or writes in a system call causes no signal: the call fails with
EFAULT.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from shmllm.errors import SegmentError
from shmllm.sigbus.bus_handler import (
    ACTION_BYTES,
    HANDLERS,
    NUM_ENTRIES,
    TABLE_OFFSET,
    WORDS_PER_ENTRY,
    Handler,
)

_ENTRIES_OFFSET = TABLE_OFFSET + ACTION_BYTES
_TABLE_BYTES = ACTION_BYTES + NUM_ENTRIES * WORDS_PER_ENTRY * 8
_BEGIN, _SIZE, _LOST = range(WORDS_PER_ENTRY)
_SA_SIGINFO = 4
_SA_ONSTACK = 0x0800_0000
_KERNEL_SIGNAL_SET_BYTES = 8

_libc = ctypes.CDLL(None, use_errno=True)


class _Action(ctypes.Structure):
    """`struct sigaction` of glibc and musl."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class Guard:
    """The entry of some protected memory in the handler's table.

    Args:
        entries: the table's entries.
        index: the number of the entry.
    """

    __slots__ = ("_entries", "_first")

    def __init__(self, entries: memoryview, index: int) -> None:
        self._entries = entries
        self._first = index * WORDS_PER_ENTRY

    @property
    def is_lost(self) -> bool:
        """Whether the memory was replaced by zeros."""
        return self._entries[self._first + _LOST] != 0

    def _begin(self, address: int, nbytes: int) -> None:
        self._entries[self._first + _LOST] = 0
        self._entries[self._first + _BEGIN] = address
        self._entries[self._first + _SIZE] = nbytes

    def _end(self) -> None:
        self._entries[self._first + _SIZE] = 0


class _Table:
    """The installed handler with the table of its mappings; it lives as long as the process.

    Args:
        handler: the handler for this machine.

    Raises:
        OSError: the system refuses memory that holds code, or the signal's action.
    """

    def __init__(self, handler: Handler) -> None:
        memory = mmap.mmap(
            -1, TABLE_OFFSET + _TABLE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        # The code must stay mapped until the process ends, also while the interpreter ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
        memory[: len(handler.code)] = handler.code
        address = _address_of(memory)
        table = ctypes.c_void_p(address + TABLE_OFFSET)
        numbers = ctypes.c_long(handler.sigaction), ctypes.c_long(signal.SIGBUS)
        size = ctypes.c_long(_KERNEL_SIGNAL_SET_BYTES)
        _check(_libc.syscall(*numbers, ctypes.c_void_p(None), table, size))
        readable_code = mmap.PROT_READ | mmap.PROT_EXEC
        _check(
            _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(TABLE_OFFSET), readable_code)
        )
        action = _Action(handler=address, flags=_SA_SIGINFO | _SA_ONSTACK)
        _check(_libc.sigaction(signal.SIGBUS, ctypes.byref(action), None))
        self._entries = memoryview(memory)[_ENTRIES_OFFSET:].cast("Q")
        self._free = list(range(NUM_ENTRIES))

    def add(self, address: int, nbytes: int) -> Guard:
        try:
            index = self._free.pop()
        except IndexError:
            raise SegmentError(
                f"this process uses {NUM_ENTRIES} segments of shared memory, which is the most "
                "that it protects against damage: close some"
            ) from None
        guard = Guard(self._entries, index)
        guard._begin(address, nbytes)
        return guard

    def remove(self, guard: Guard) -> None:
        guard._end()
        self._free.append(guard._first // WORDS_PER_ENTRY)


_table: _Table | None = None


def install() -> bool:
    """Install the handler in this process; further calls do nothing. Call `faulthandler.enable`
    before this, if at all.

    Returns:
        False if there is none for this machine, or if the system refuses it. Mappings are not
        protected then.
    """
    global _table
    handler = HANDLERS.get(platform.machine())
    if _table is None and handler is not None:
        try:
            _table = _Table(handler)
        except OSError:
            return False
    return _table is not None


def guard(mapping: mmap.mmap) -> Guard | None:
    """Protect a mapping until its end; None if this process has no handler.

    Raises:
        SegmentError: the process has too many protected mappings.
    """
    if _table is None:
        return None
    added = _table.add(_address_of(mapping), len(mapping))
    # The end of the mapping, not of its Segment: views may keep the mapping for longer.
    weakref.finalize(mapping, _table.remove, added).atexit = False
    return added


@contextmanager
def guarded(address: int, nbytes: int) -> Iterator[Guard | None]:
    """Protect a part of a mapping, whose object is not at hand, for the time of a `with` block;
    None if this process has no handler. The pages at both ends are protected as a whole.

    Args:
        address: where the part begins.
        nbytes: its size.

    Raises:
        SegmentError: the process has too many protected mappings.
    """
    if _table is None:
        yield None
        return
    begin, end = address // mmap.PAGESIZE, -(-(address + nbytes) // mmap.PAGESIZE)
    added = _table.add(begin * mmap.PAGESIZE, (end - begin) * mmap.PAGESIZE)
    try:
        yield added
    finally:
        _table.remove(added)


def _address_of(mapping: mmap.mmap) -> int:
    import numpy as np  # front ends, which have no handler, import this module too

    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
