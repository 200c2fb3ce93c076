"""Doorbells: semaphores with which one process wakes another.

This module owns the two implementations and the choice between them. A doorbell is only a hint:
a post may come without a reason, and a post may be lost. Therefore the waiter checks its
condition in shared memory again after each wait, and gives each wait a time limit. This module
must not know the condition.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import sys
import time
from typing import Any, Protocol

from shmllm.errors import ProtocolMismatchError, SegmentError
from shmllm.ipc.layout import (
    DOORBELL_BYTES,
    DOORBELL_KIND_OFFSET,
    DOORBELL_NAME_BYTES,
    DOORBELL_NAME_OFFSET,
    DOORBELL_SEM_OFFSET,
    WORD_BYTES,
)
from shmllm.ipc.states import DoorbellKind
from shmllm.ipc.words import Word

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


# sem_post and sem_trywait never block, so PyDLL keeps the GIL and saves the cost of releasing it.
_quick = ctypes.PyDLL(None)
_blocking = ctypes.CDLL(None, use_errno=True)
HAS_CLOCKWAIT = hasattr(_blocking, "sem_clockwait")
_sem_init = _quick.sem_init
_sem_post = _quick.sem_post
_sem_trywait = _quick.sem_trywait
_sem_clockwait = _blocking.sem_clockwait if HAS_CLOCKWAIT else None


def _new_semaphore() -> bytes:
    """The bytes of a process-shared `sem_t` that has no post and no waiter."""
    memory = ctypes.create_string_buffer(DOORBELL_NAME_OFFSET - DOORBELL_SEM_OFFSET)
    if _sem_init(memory, 1, 0) != 0:
        raise SegmentError("sem_init refused a process-shared semaphore")
    return memory.raw


# glibc keeps the posts and the waiters in the first word. The second word never changes, and holds
# flags for the kernel's futex call.
_NEW_SEMAPHORE = _new_semaphore()
_FLAGS_OFFSET = DOORBELL_SEM_OFFSET + WORD_BYTES
_FLAGS = int.from_bytes(_NEW_SEMAPHORE[WORD_BYTES : 2 * WORD_BYTES], sys.byteorder)


class SemDoorbell:
    """A `sem_t` inside a segment; its waits use the monotonic clock.

    A faulty process can write anything into it. libc trusts the flags: a damaged word makes
    `sem_post` sleep for ever or abort the process. So each call checks the flags first. A poster
    leaves a damaged semaphore alone, and the waiter, of which there is only one, makes it new.
    Either costs a post, which any wait survives.

    Args:
        area: the doorbell's bytes in a segment, as in the diagram in `layout`.
    """

    __slots__ = ("_flags", "_reference")

    def __init__(self, area: memoryview) -> None:
        # A pointer that keeps its target, and so the mapping of the segment. A thread that waits
        # has a reference to it, so `close` in another thread, or at the end of the interpreter,
        # does not unmap the memory that libc is going to read.
        self._reference: Any = ctypes.byref(ctypes.c_char.from_buffer(area, DOORBELL_SEM_OFFSET))
        self._flags = Word(area, _FLAGS_OFFSET)

    def _semaphore(self) -> Any:
        if self._reference is None:
            raise SegmentError("this doorbell is closed")
        return self._reference

    def initialise(self) -> None:
        """Make the semaphore new. Only the creator of the segment calls this, before any other
        process can open the segment, and later the waiter, while it does not wait."""
        ctypes.memmove(self._semaphore(), _NEW_SEMAPHORE, len(_NEW_SEMAPHORE))

    def post(self) -> None:
        # sem_post fails only if the count is at its maximum, and then a post is pending anyway.
        semaphore = self._semaphore()
        if self._flags.load() == _FLAGS:
            _sem_post(semaphore)

    def try_wait(self) -> bool:
        return bool(_sem_trywait(self._semaphore()) == 0)

    def wait(self, timeout_s: float) -> bool:
        assert _sem_clockwait is not None
        semaphore = self._semaphore()
        if self._flags.load() != _FLAGS:
            self.initialise()
        deadline_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(timeout_s * 1e9)
        deadline = ctypes.byref(_Timespec(*divmod(deadline_ns, 1_000_000_000)))
        # Each iteration lets Python run the handler of the signal that interrupted the wait.
        while _sem_clockwait(semaphore, time.CLOCK_MONOTONIC, deadline) != 0:
            reason = ctypes.get_errno()
            if reason == errno.ETIMEDOUT:
                return False
            if reason != errno.EINTR:
                raise SegmentError(f"sem_clockwait failed: {os.strerror(reason)}")
        return True

    def drain(self) -> None:
        semaphore = self._semaphore()
        for _ in range(MAX_DRAINED_POSTS):
            if _sem_trywait(semaphore) != 0:
                return
        self.initialise()  # so many posts are a damaged count, or not worth taking one by one

    def close(self) -> None:
        self._reference = None
        self._flags.close()


def _load_posix_ipc() -> Any:
    """Import posix_ipc, which is needed only where libc lacks `sem_clockwait`."""
    try:
        import posix_ipc  # type: ignore[import-not-found]
    except ImportError as error:
        raise SegmentError(
            "this machine's libc lacks sem_clockwait, so shmllm needs the package posix_ipc: "
            "pip install posix-ipc"
        ) from error
    return posix_ipc


class NamedDoorbell:
    """A named POSIX semaphore, for a libc that cannot wait on the monotonic clock.

    `wait` polls the semaphore with sleeps of up to 1 ms, so a wake-up comes that much later than
    with `SemDoorbell`. It does not block in `acquire`, for two reasons: `acquire` uses the wall
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
    """The kind of doorbell for this machine: SEM if its libc has `sem_clockwait`."""
    return DoorbellKind.SEM if HAS_CLOCKWAIT else DoorbellKind.NAMED


def initialise_doorbell(area: memoryview, name: str, kind: DoorbellKind | None = None) -> None:
    """Create a doorbell in `area`. Only the creator of the segment calls this.

    Args:
        area: `DOORBELL_BYTES` bytes of a segment that no other process uses yet.
        name: the name for a named semaphore: a slash and letters, unique on the machine.
        kind: the implementation; None for the one that `choose_kind` returns.
    """
    kind = choose_kind() if kind is None else kind
    if kind is DoorbellKind.SEM:
        doorbell = SemDoorbell(area)
        doorbell.initialise()
        doorbell.close()
    else:
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
        raise ProtocolMismatchError(f"doorbell of kind {kind} cannot be used with this libc")
    return open_shared_doorbell(area)


def open_shared_doorbell(area: memoryview) -> Doorbell:
    """Open the doorbell in `area` without a look at its kind. All front ends may write the memory
    of an engine's doorbell, and one that damages the kind must not keep the others out."""
    if choose_kind() is DoorbellKind.SEM:
        return SemDoorbell(area)
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
