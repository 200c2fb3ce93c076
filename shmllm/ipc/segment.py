"""Segments: files of shared memory, which this module creates, attaches, locks and closes.

This module owns files, mappings and the ownership lock. It must not know the meaning of the words
after the header. A segment is an unnamed file in a memory file system (tmpfs). Another process
gets it as an inherited descriptor, and the kernel frees the file when the last process that holds
it ends, even if that process was killed.

The owner holds an open-file-description lock on one byte, through a second open file description
of the file. That description is never mapped, because a mapping would keep the description, and
with it the lock, alive. Forked children close it, because they would also keep the lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import struct
import weakref

from shmllm.errors import SegmentError
from shmllm.ipc import layout
from shmllm.ipc.access import Access, WritablePage, map_file, map_pages
from shmllm.ipc.doorbell import choose_kind, initialise_doorbell, remove_doorbell
from shmllm.ipc.segment_file import (
    NO_SPACE,
    allocate,
    check_file,
    check_header,
    no_space,
    resize,
)
from shmllm.ipc.states import DoorbellKind, SegmentKind
from shmllm.ipc.words import Word
from shmllm.sigbus import bus_guard

_FLOCK = struct.Struct("hhqqi4x")
OWNER_BYTE = 0
SWEEPER_BYTE = 1
LOST = (
    "was truncated, or has a hole and its file system is full; what this process read there since "
    "are zeros"
)
_live: weakref.WeakSet[Segment] = weakref.WeakSet()


class Segment:
    """One mapped segment. `create` and `attach` return one; `close` or a `with` block ends it.

    Attributes:
        kind: the kind of the segment.
        is_usable: False after `close` and in forked children.
    """

    def __init__(self, fd: int, kind: SegmentKind, mapping: mmap.mmap, *, created: bool) -> None:
        self.kind = kind
        self._fd = fd
        self._mapping: mmap.mmap | None = mapping
        self._buffer = memoryview(mapping)
        self._pages: list[WritablePage] = []
        self._created = created
        self._owner_fd: int | None = None
        self._guard = bus_guard.guard(mapping)
        self._pid = os.getpid()
        self._closed = False
        self.is_usable = True
        _live.add(self)

    @classmethod
    def create(cls, kind: SegmentKind, *, directory: str = "/dev/shm") -> Segment:
        """Create an initialised, unnamed segment.

        Args:
            kind: the kind of the segment.
            directory: a directory of the file system for the file.

        Raises:
            NoSpaceError: the file system has too little free space.
            SegmentError: the directory does not support unnamed files or is not writable.
        """
        try:
            fd = above_standard_streams(
                os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
            )
        except OSError as error:
            if error.errno in NO_SPACE:
                space = os.statvfs(directory)
                raise no_space(layout.ALLOCATED_BYTES[kind], directory, space, error) from error
            raise SegmentError(
                f"cannot create a shared memory segment in {directory}: {error.strerror}; it has "
                "to be a writable tmpfs"
            ) from error
        try:
            allocate(fd, 0, layout.ALLOCATED_BYTES[kind])
            resize(fd, layout.TOTAL_BYTES[kind])
            segment = cls(fd, kind, map_file(fd, layout.TOTAL_BYTES[kind]), created=True)
        except OSError as error:
            os.close(fd)
            raise SegmentError(f"cannot map a new segment: {error.strerror}") from error
        except BaseException:
            os.close(fd)
            raise
        try:
            segment._initialise()
        except BaseException:
            segment.close()
            raise
        return segment

    @classmethod
    def attach(cls, fd: int, kind: SegmentKind, access: Access = Access.ALL) -> Segment:
        """Map a segment that another process created.

        Args:
            fd: the descriptor of the file, inherited or opened. After success the segment owns
                the descriptor and closes it.
            kind: the expected kind of the segment.
            access: the part that this process may write.

        Raises:
            ProtocolMismatchError: the file is no initialised segment of this kind and version.
            SegmentError: the file cannot be mapped, has holes where it needs memory, or belongs
                to another user.
        """
        try:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid():
                raise SegmentError(
                    f"the segment belongs to user {status.st_uid}, this process is user "
                    f"{os.geteuid()}"
                )
            check_file(fd, status, kind)
            check_header(fd, kind)
            pages = map_pages(fd, access)
            mapping = map_file(fd, layout.TOTAL_BYTES[kind], access)
            os.set_inheritable(fd, False)
        except OSError as error:
            raise SegmentError(f"cannot attach descriptor {fd}: {error.strerror}") from error
        segment = cls(fd, kind, mapping, created=False)
        segment._pages = pages
        return segment

    def restrict(self, access: Access) -> None:
        """Give up the right to write more than the pages of `access`. No view of the segment may
        exist. The descriptor stays writable, for a child process.

        Raises:
            SegmentError: the segment cannot be mapped again.
        """
        try:
            pages = map_pages(self.fd, access)
            mapping = map_file(self.fd, layout.TOTAL_BYTES[self.kind], access)
        except OSError as error:
            raise SegmentError(f"cannot map a segment again: {error.strerror}") from error
        self._unmap()
        self._mapping, self._buffer, self._pages = mapping, memoryview(mapping), pages
        self._guard = bus_guard.guard(mapping)

    @property
    def fd(self) -> int:
        """The descriptor, for passing to a child process (`pass_fds`); the segment closes it."""
        self.check_usable()
        return self._fd

    @property
    def buffer(self) -> memoryview:
        """All bytes of the segment; writable if this process has `Access.ALL`."""
        self.check_usable()
        return self._buffer

    def part(self, offset: int, nbytes: int) -> memoryview:
        """The bytes [offset, offset + nbytes), writable if this process may write them."""
        self.check_usable()
        for page in self._pages:
            if (found := page.part(offset, nbytes)) is not None:
                return found
        return self._buffer[offset : offset + nbytes]

    @property
    def nonce(self) -> int:
        """A random number that identifies this segment."""
        return Word(self.buffer, layout.NONCE_OFFSET).load()

    @property
    def creator_pid(self) -> int:
        """The pid of the creating process in its own pid namespace."""
        return Word(self.buffer, layout.CREATOR_PID_OFFSET).load()

    @property
    def creator_pid_namespace(self) -> int:
        """Inode of the pid namespace in which `creator_pid` is valid."""
        return Word(self.buffer, layout.CREATOR_PID_NAMESPACE_OFFSET).load()

    @property
    def is_lost(self) -> bool:
        """Whether the mapping lost its file, because that was truncated, or had a hole when its
        file system was full. Then the mapping contains zeros, which no other process sees. Always
        False in a process without the handler of `bus_guard`, which SIGBUS ends instead."""
        return self._guard is not None and self._guard.is_lost

    def check_intact(self, what: str) -> None:
        """Raise SegmentError if the mapping lost its file. A reader calls this after it has read.

        Args:
            what: the subject of the message: the segment's path or owner.
        """
        if self.is_lost:
            raise SegmentError(f"{what} {LOST}")

    def check_usable(self) -> None:
        """Raise SegmentError if the segment is closed or belongs to the parent process."""
        if self._closed:
            raise SegmentError(f"this {self.kind.name} segment is closed")
        if os.getpid() != self._pid:
            raise SegmentError(
                f"this {self.kind.name} segment belongs to process {self._pid}; the forked "
                f"process {os.getpid()} cannot use it: create one of its own after the fork"
            )

    def allocate(self, offset: int, nbytes: int) -> None:
        """Allocate the pages of [offset, offset + nbytes), or raise NoSpaceError."""
        allocate(self.fd, offset, nbytes)

    def discard(self, offset: int, nbytes: int) -> None:
        """Free the pages of [offset, offset + nbytes); both numbers are multiples of the page
        size.

        The range stays mapped in every process. A later access gets new pages of zeros.
        """
        self.check_usable()
        if self._mapping is not None and not self.is_lost:
            self._mapping.madvise(mmap.MADV_REMOVE, offset, nbytes)

    def take_ownership(self) -> None:
        """Become the owner until this segment is closed or this process ends.

        Raises:
            SegmentError: another process, or another Segment object of this process, is the
                owner.
        """
        if self._owner_fd is not None:
            return
        owner_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.fcntl(owner_fd, fcntl.F_OFD_SETLK, write_lock(OWNER_BYTE))
        except OSError as error:
            os.close(owner_fd)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise SegmentError(f"another process owns this {self.kind.name} segment") from None
            raise SegmentError(f"cannot lock the segment: {error.strerror}") from error
        self._owner_fd = owner_fd

    def is_owned(self) -> bool:
        """Whether a living process, possibly this one, owns the segment.

        A stopped process stays the owner. A killed process does not, even before its parent has
        reaped it.
        """
        return is_locked(self.fd)

    def close(self) -> None:
        """Unmap the memory, close the file and give up ownership; idempotent.

        Views derived from `buffer` become unusable, or keep the mapping alive until they are
        garbage-collected. In a forked child this affects only the child's descriptors and
        mapping.
        """
        is_creator = not self._closed and self._created and os.getpid() == self._pid
        # A futex ends with the file. The file may be truncated, so it is not read without need.
        if is_creator and choose_kind() is DoorbellKind.NAMED:
            remove_doorbell(self._doorbell_area())
        self._closed = True
        self.is_usable = False
        self._guard = None
        self._drop_owner_fd()
        self._unmap()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _initialise(self) -> None:
        buffer = self._buffer
        nonce = secrets.randbits(59) * layout.NONCE_STEP + 2**62
        # No other user can take a name with 128 random bits before this process does.
        initialise_doorbell(self._doorbell_area(), f"/shmllm-{secrets.token_hex(16)}")
        fields = {
            layout.KIND_OFFSET: self.kind,
            layout.SIZE_OFFSET: layout.TOTAL_BYTES[self.kind],
            layout.NONCE_OFFSET: nonce,
            layout.CREATOR_PID_OFFSET: os.getpid(),
            layout.CREATOR_PID_NAMESPACE_OFFSET: pid_namespace(),
            # SYNC POINT: segment initialised. A dictionary keeps its order: version comes last.
            layout.MAGIC_OFFSET: layout.MAGIC,
            layout.VERSION_OFFSET: layout.PROTOCOL_VERSION,
        }
        for offset, value in fields.items():
            word = Word(buffer, offset)
            word.store(value)
            word.close()

    def _doorbell_area(self) -> memoryview:
        begin = layout.DOORBELL_OFFSETS[self.kind]
        return self._buffer[begin : begin + layout.DOORBELL_BYTES]

    def _drop_owner_fd(self) -> None:
        if self._owner_fd is not None:
            owner_fd, self._owner_fd = self._owner_fd, None
            os.close(owner_fd)

    def _unmap(self) -> None:
        # Arrays and views over the memory may still exist. The last of them unmaps it, so this
        # object must not keep a reference to the mapping.
        mapping, self._mapping = self._mapping, None
        pages, self._pages = self._pages, []
        for page in pages:
            with contextlib.suppress(BufferError):
                page.close()
        with contextlib.suppress(BufferError):
            self._buffer.release()
            if mapping is not None:
                mapping.close()

    def _abandon_in_child(self) -> None:
        self.is_usable = False
        self._drop_owner_fd()


def above_standard_streams(fd: int) -> int:
    """Move a descriptor to a number of 3 or more. If stdin is closed, a new descriptor can be 0,
    and a child process that inherits it would replace it by its own stdin."""
    if fd > 2:
        return fd
    moved: int = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved


def pid_namespace() -> int:
    """Inode of this process's pid namespace; pids are comparable only within one namespace."""
    return os.stat("/proc/self/ns/pid").st_ino


def _abandon_all_in_child() -> None:
    for segment in list(_live):
        segment._abandon_in_child()


os.register_at_fork(after_in_child=_abandon_all_in_child)


def is_locked(fd: int) -> bool:
    """Whether any process owns the segment whose file `fd` refers to."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, write_lock(OWNER_BYTE))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def write_lock(byte: int) -> bytes:
    """A `struct flock` for a write lock on one byte of a file, for the F_OFD commands."""
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)


def set_lock(fd: int, byte: int, kind: int) -> bool:
    """Lock or unlock one byte of a file for the open file description.

    Args:
        fd: the file, open for what the lock is for.
        byte: the byte.
        kind: fcntl.F_RDLCK, F_WRLCK or F_UNLCK.

    Returns:
        False: another description has the lock.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
        return True
    except (BlockingIOError, PermissionError):
        return False
