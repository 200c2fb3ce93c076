"""Doorbells: semaphores with which one process wakes another.

This module owns the two implementations and the choice between them. A doorbell is only a hint:
a post may come without a reason, and a post may be lost. Therefore the waiter checks its
condition in shared memory before each wait, behind a fence, and again after it, and gives each wait
a time limit. This module must not know the condition.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import re
import time
from typing import Any, Protocol

from shmllm.errors import ProtocolMismatchError, SegmentError
from shmllm.ipc.layout import (
    DOORBELL_BYTES,
    DOORBELL_KIND_OFFSET,
    DOORBELL_NAME_BYTES,
    DOORBELL_NAME_OFFSET,
    DOORBELL_POSTED_OFFSET,
)
from shmllm.ipc.states import DoorbellKind
from shmllm.ipc.words import PlainWord, Word

MAX_DRAINED_POSTS = 64
_NAMED_POLL_MIN_S = 0.00005
_NAMED_POLL_MAX_S = 0.001
_NAME = re.compile(rb"/shmllm-[A-Za-z0-9-]+")


class Doorbell(Protocol):
    """The interface of both implementations."""

    def post(self) -> None:
        """Wake the waiter; if nobody waits, the next wait returns at once. A signal handler may
        call this."""

    def try_wait(self) -> bool:
        """Take one post without waiting; False if no post is left."""

    def wait(self, timeout_s: float) -> bool:
        """Take one post, and sleep until it comes; False if none came within `timeout_s`.

        Python runs signal handlers during the sleep. An exception of a handler ends the wait and
        is raised from here.
        """

    def drain(self) -> None:
        """Take the remaining posts. Only the waiter may call this."""

    def close(self) -> None:
        """Release the memory; idempotent."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# Little-endian machines, on which the kernel's 32 bits are the low half of a word.
_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}
HAS_FUTEX = platform.system() == "Linux" and platform.machine() in _FUTEX_NUMBERS
_FUTEX = _FUTEX_NUMBERS.get(platform.machine(), -1)
# From <linux/futex.h>. All are without FUTEX_PRIVATE_FLAG, so processes share a futex.
_FUTEX_WAKE = 1
_FUTEX_WAIT_BITSET = 9  # its time limit is a time of CLOCK_MONOTONIC
_FUTEX_BITSET_MATCH_ANY = -1  # all 32 bits
_ALL_WAITERS = 2**31 - 1


# A wake-up never blocks, so PyDLL keeps the GIL and saves the cost of releasing it. All numbers of
# a call fit into a C int, which is what ctypes makes of them without `argtypes`, twice as fast.
_wake = ctypes.PyDLL(None).syscall
_sleep = ctypes.CDLL(None, use_errno=True).syscall


class FutexDoorbell:
    """A binary semaphore in a segment: a word that posters set and the waiter clears.

    A faulty process can write anything into the word. Any value but 0 is a post, so damage costs
    or adds posts, which any wait survives, and no library trusts the bytes. (libc's `sem_t` has
    flags for the kernel beside its count; damaged, they make it abort the process.)

    Args:
        area: the doorbell's bytes in a segment, as in the diagram in `layout`.
    """

    __slots__ = ("_parts",)

    def __init__(self, area: memoryview) -> None:
        # A pointer that keeps its target, and so the mapping of the segment. A thread that waits
        # has a reference to both, so `close` in another thread, or at the end of the interpreter,
        # does not unmap the memory that the thread or the kernel is going to read.
        offset = DOORBELL_POSTED_OFFSET
        pointer = ctypes.byref(ctypes.c_char.from_buffer(area, offset))
        self._parts: tuple[Any, PlainWord] | None = pointer, Word(area, offset)

    def _opened(self) -> tuple[Any, PlainWord]:
        parts = self._parts
        if parts is None:
            raise SegmentError("this doorbell is closed")
        return parts

    def post(self) -> None:
        futex, posted = self._opened()
        posted.store(1)
        # No wake-up is lost between the two: the kernel puts a waiter to sleep only while the word
        # is 0, which it checks under the lock under which it looks for waiters to wake.
        _wake(_FUTEX, futex, _FUTEX_WAKE, _ALL_WAITERS)

    def try_wait(self) -> bool:
        _, posted = self._opened()
        if not posted.load():
            return False
        posted.store(0)
        return True

    def wait(self, timeout_s: float) -> bool:
        futex, _ = self._opened()
        deadline_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(timeout_s * 1e9)
        deadline = ctypes.byref(_Timespec(*divmod(max(deadline_ns, 0), 1_000_000_000)))
        # Each iteration lets Python run the handler of the signal that interrupted the sleep.
        while not self.try_wait():
            result = _sleep(
                _FUTEX, futex, _FUTEX_WAIT_BITSET, 0, deadline, None, _FUTEX_BITSET_MATCH_ANY
            )
            reason = ctypes.get_errno() if result else 0
            if reason == errno.ETIMEDOUT:
                return self.try_wait()
            if reason not in (0, errno.EAGAIN, errno.EINTR):
                raise SegmentError(f"cannot wait on a doorbell: {os.strerror(reason)}")
        return True

    def drain(self) -> None:
        self.try_wait()

    def close(self) -> None:
        self._parts = None


def _load_posix_ipc() -> Any:
    """Import posix_ipc, which is needed only where `HAS_FUTEX` is False."""
    try:
        import posix_ipc  # type: ignore[import-not-found]
    except ImportError as error:
        raise SegmentError(
            "shmllm has no futex for this machine and needs the package posix_ipc: "
            "pip install posix-ipc"
        ) from error
    return posix_ipc


class NamedDoorbell:
    """A named POSIX semaphore, for a machine whose futex call this module does not know.

    `wait` polls the semaphore with sleeps of up to 1 ms, so a wake-up comes that much later than
    with `FutexDoorbell`. It does not block in `acquire`, for two reasons: `acquire` uses the wall
    clock, which can be set back, and it replaces the exception of a signal handler by its own.

    Args:
        name: the name of an existing semaphore, with its leading slash.
    """

    __slots__ = ("_no_post", "_semaphore")

    def __init__(self, name: str) -> None:
        posix_ipc = _load_posix_ipc()
        self._no_post = (posix_ipc.BusyError, posix_ipc.SignalError)
        try:
            self._semaphore: Any = posix_ipc.Semaphore(name)
        except (posix_ipc.Error, OSError, ValueError) as error:
            raise SegmentError(f"cannot open the doorbell {name!r}: {error}") from error

    @staticmethod
    def make(name: str) -> None:
        """Create the semaphore. Only the creator of the segment calls this; it also unlinks it."""
        posix_ipc = _load_posix_ipc()
        try:
            posix_ipc.Semaphore(name, posix_ipc.O_CREX, mode=0o600, initial_value=0).close()
        except (posix_ipc.Error, OSError) as error:
            raise SegmentError(f"cannot create the doorbell {name}: {error}") from error

    def _open(self) -> Any:
        if self._semaphore is None:
            raise SegmentError("this doorbell is closed")
        return self._semaphore

    def post(self) -> None:
        # OSError means that the count is at its maximum, and then a post is pending anyway.
        with contextlib.suppress(OSError):
            self._open().release()

    def try_wait(self) -> bool:
        try:
            self._open().acquire(0)
        except self._no_post:
            return False
        return True

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        pause_s = _NAMED_POLL_MIN_S
        while not self.try_wait():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _NAMED_POLL_MAX_S)
        return True

    def drain(self) -> None:
        for _ in range(MAX_DRAINED_POSTS):
            if not self.try_wait():
                return

    def close(self) -> None:
        if self._semaphore is not None:
            self._semaphore.close()
            self._semaphore = None


def choose_kind() -> DoorbellKind:
    """The kind of doorbell for this machine: FUTEX if this module knows its futex call."""
    return DoorbellKind.FUTEX if HAS_FUTEX else DoorbellKind.NAMED


def initialise_doorbell(area: memoryview, name: str, kind: DoorbellKind | None = None) -> None:
    """Create a doorbell in `area`. Only the creator of the segment calls this.

    Args:
        area: `DOORBELL_BYTES` zero bytes of a segment that no other process uses yet.
        name: the name for a named semaphore: a slash and letters, unique on the machine.
        kind: the implementation; None for the one that `choose_kind` returns.
    """
    kind = choose_kind() if kind is None else kind
    if kind is DoorbellKind.NAMED:
        NamedDoorbell.make(name)
        encoded = name.encode("ascii").ljust(DOORBELL_NAME_BYTES, b"\0")
        area[DOORBELL_NAME_OFFSET:DOORBELL_BYTES] = encoded
    word = Word(area, DOORBELL_KIND_OFFSET)
    word.store(kind)
    word.close()


def open_doorbell(area: memoryview) -> Doorbell:
    """Open the doorbell that the creator of the segment made in `area`.

    Raises:
        ProtocolMismatchError: `area` does not hold the kind of doorbell that this machine uses,
            or no valid name.
        SegmentError: the named semaphore cannot be opened.
    """
    kind = Word(area, DOORBELL_KIND_OFFSET).load()
    if kind != choose_kind():
        raise ProtocolMismatchError(f"doorbell of kind {kind} cannot be used on this machine")
    return open_shared_doorbell(area)


def open_shared_doorbell(area: memoryview) -> Doorbell:
    """Open the doorbell in `area` without a look at its kind. All front ends may write the memory
    of an engine's doorbell, and one that damages the kind must not keep the others out."""
    if choose_kind() is DoorbellKind.FUTEX:
        return FutexDoorbell(area)
    return NamedDoorbell(_stored_name(area))


def remove_doorbell(area: memoryview) -> None:
    """Unlink the semaphore of a named doorbell. Only the creator of the segment calls this."""
    if choose_kind() is DoorbellKind.NAMED:
        posix_ipc = _load_posix_ipc()
        with contextlib.suppress(posix_ipc.Error, OSError, ProtocolMismatchError):
            posix_ipc.unlink_semaphore(_stored_name(area))


def _stored_name(area: memoryview) -> str:
    name = bytes(area[DOORBELL_NAME_OFFSET:DOORBELL_BYTES]).rstrip(b"\0")
    if not _NAME.fullmatch(name):
        raise ProtocolMismatchError(f"{name!r} is no name of a doorbell; memory is damaged")
    return name.decode("ascii")
