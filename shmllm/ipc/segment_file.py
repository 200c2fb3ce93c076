"""The file of a segment: its size, memory and header, which are checked before it is mapped.

This module must not know mappings. It reads with `pread`, because an access to a mapping ends the
process with SIGBUS if the file was truncated, or has a hole and its file system is full.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from shmllm.errors import NoSpaceError, ProtocolMismatchError, SegmentError
from shmllm.ipc import layout
from shmllm.ipc.states import SegmentKind
from shmllm.ipc.words import fence

NO_SPACE = (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT)
"""The errors of a file system that is full."""
_BLOCK_BYTES = 512


def allocate(fd: int, offset: int, nbytes: int) -> None:
    """Allocate the memory of [offset, offset + nbytes), or raise NoSpaceError."""
    with _explained_space_errors(fd, nbytes):
        os.posix_fallocate(fd, offset, nbytes)


def resize(fd: int, nbytes: int) -> None:
    """Set the size of the file, or raise NoSpaceError."""
    with _explained_space_errors(fd, nbytes):
        os.ftruncate(fd, nbytes)


@contextlib.contextmanager
def _explained_space_errors(fd: int, nbytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise SegmentError(f"cannot allocate shared memory: {error.strerror}") from error
        directory = os.path.dirname(path_of(fd))
        raise no_space(nbytes, directory, os.fstatvfs(fd), error) from error


def no_space(nbytes: int, directory: str, space: os.statvfs_result, error: OSError) -> NoSpaceError:
    """The error that says what to do.

    Args:
        nbytes: the needed bytes.
        directory: a directory of the file system.
        space: the figures of that file system.
        error: the refusal.
    """
    free = f"{space.f_bavail * space.f_frsize} bytes free"
    if space.f_files and not space.f_favail:
        free += ", but no room for another file,"
    return NoSpaceError(
        f"shared memory is full: {nbytes} bytes needed, {free} in {directory} "
        f"({error.strerror}). Remove stale files there (shmllm ipc gc --yes; shmllm kv clear), "
        "enlarge it (docker: --shm-size, Kubernetes: an emptyDir with medium Memory), or raise the "
        "file size limit (ulimit -f)"
    )


def path_of(fd: int) -> str:
    """The path of an open file, for messages."""
    return os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")


def check_file(fd: int, status: os.stat_result, kind: SegmentKind) -> None:
    """Check the size and the allocated memory of a segment's file before it is mapped.

    Raises:
        ProtocolMismatchError: the file has another size.
        SegmentError: the file has holes where a segment has memory.
    """
    if status.st_size != layout.TOTAL_BYTES[kind]:
        raise ProtocolMismatchError(
            f"a {kind.name} segment has {layout.TOTAL_BYTES[kind]} bytes in this version, this "
            f"file has {status.st_size}: front end and engine are of different versions, or "
            f"{path_of(fd)} is no segment or was truncated"
        )
    allocated = status.st_blocks * _BLOCK_BYTES
    if allocated < layout.ALLOCATED_BYTES[kind]:
        raise SegmentError(
            f"{path_of(fd)} has holes: a {kind.name} segment has at least "
            f"{layout.ALLOCATED_BYTES[kind]} bytes of memory, this file has {allocated}. Another "
            "process has damaged it"
        )


def check_header(fd: int, kind: SegmentKind) -> None:
    """Raise ProtocolMismatchError unless the file is an initialised segment of this kind."""
    # `pread` of a truncated file or of a hole gives no SIGBUS.
    # SYNC POINT: segment initialised. Load the version first: the creator stored it last.
    version = _word_at(fd, layout.VERSION_OFFSET)
    fence()
    magic, stored_kind = _word_at(fd, layout.MAGIC_OFFSET), _word_at(fd, layout.KIND_OFFSET)
    if magic != layout.MAGIC:
        raise ProtocolMismatchError(
            f"no shmllm segment: magic {magic:#x}, expected {layout.MAGIC:#x}"
        )
    if version != layout.PROTOCOL_VERSION:
        raise ProtocolMismatchError(
            f"the segment speaks version {version}, this process version "
            f"{layout.PROTOCOL_VERSION}: run front end and engine from the same installation"
        )
    if stored_kind != kind:
        raise ProtocolMismatchError(
            f"the segment is of kind {stored_kind}, expected {kind.value} ({kind.name})"
        )


def _word_at(fd: int, offset: int) -> int:
    return int.from_bytes(os.pread(fd, layout.WORD_BYTES, offset), "little")
