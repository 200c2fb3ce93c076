"""Who owns the file of a region: making, adopting and removing it, and its locks.

The owner holds a lock on one byte of the file, which ends with its process. Who adopts or removes a
region whose owner has ended holds a second lock meanwhile, so that nobody removes what another
adopts.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from shmllm.errors import SegmentError
from shmllm.ipc import folder
from shmllm.ipc.segment import OWNER_BYTE, SWEEPER_BYTE, is_locked, set_lock
from shmllm.ipc.segment_file import allocate, resize
from shmllm.shared_kv.layout import (
    NUM_PLACES,
    RegionLayout,
)
from shmllm.shared_kv.own_region import OwnRegion
from shmllm.shared_kv.region import open_regular


def create(path: Path, place: int, layout: RegionLayout) -> OwnRegion:
    """Make a region and give it its name.

    Args:
        path: the path of its name.
        place: its place in the folder.
        layout: its layout.

    Raises:
        FileExistsError: the name is taken.
        NoSpaceError: shared memory is full.
    """
    fd = os.open(path.parent, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    try:
        resize(fd, layout.data_offset + layout.data_bytes)
        allocate(fd, 0, layout.pins_offset)
        if layout.data_bytes:
            allocate(fd, layout.data_offset, layout.data_bytes)
        words = b"".join(word.to_bytes(8, "little") for word in layout.header())
        os.pwrite(fd, words, 0)
        lock = _lock(fd)
        assert lock is not None, "nobody else has the file"
        try:
            folder.link(fd, path)
            return OwnRegion(fd, path, place, lock)
        except BaseException:
            os.close(lock)
            raise
    except BaseException:
        os.close(fd)
        raise


def adopt(
    path: Path, place: int, layout: RegionLayout, is_any_size: bool = False
) -> OwnRegion | None:
    """Become the owner of a region whose owner has ended. Its valid blocks stay valid, and readers
    go on reading them.

    Args:
        path: its path.
        place: its place in the folder.
        layout: the layout that it has to have.
        is_any_size: whether only the shape of its blocks has to be that of the layout.

    Returns:
        None if it has an owner, another layout, or is being removed.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be opened.
        ProtocolMismatchError: it is damaged, or of another version.
    """
    fd = open_regular(path, os.O_RDWR)
    try:
        sweeping = lock_sweeper(fd)
        lock = None
        if sweeping is not None:
            try:
                lock = _lock(fd)
                # An owner that has ended may have taken the name away before it gave the lock up.
                if lock is not None and not os.fstat(fd).st_nlink:
                    os.close(lock)
                    lock = None
            finally:
                os.close(sweeping)
        if lock is None:
            os.close(fd)
            return None
    except BaseException:
        os.close(fd)
        raise
    try:
        region = OwnRegion(fd, path, place, lock)
    except BaseException:
        os.close(lock)
        os.close(fd)
        raise
    is_suitable = region.layout.shape == layout.shape and region.layout.data_bytes > 0
    if not is_suitable or (region.layout != layout and not is_any_size):
        region.close()
        return None
    for other in range(NUM_PLACES):
        region.drop_pins_of(other)
    region.rebuild_index()
    region.touch()
    return region


def remove(path: Path) -> bool:
    """Remove the name of a region whose owner has ended. Readers keep its memory until they no
    longer read it.

    Returns:
        Whether the name is free now.

    Raises:
        SegmentError: it cannot be opened.
    """
    try:
        fd = open_regular(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError as error:
        raise SegmentError(f"cannot open {path}: {error.strerror}") from error
    try:
        # The lock of sweepers first: who adopts the region takes it before that of the owner.
        sweeping = lock_sweeper(fd)
        if sweeping is None:
            return False
        try:
            if is_locked(fd):
                return False
            if os.fstat(fd).st_nlink:
                os.unlink(path)
            return True
        finally:
            os.close(sweeping)
    finally:
        os.close(fd)


def is_owned(path: Path) -> bool:
    """Whether a living process owns the file, which need not be a region.

    Raises:
        OSError: it cannot be opened.
    """
    fd = open_regular(path, os.O_RDONLY)
    try:
        return is_locked(fd)
    finally:
        os.close(fd)


def lock_sweeper(fd: int) -> int | None:
    """Keep others from removing or adopting a file until the returned descriptor is closed; None
    if another process does so now."""
    return _locked(fd, SWEEPER_BYTE)


def own_together(fd: int) -> None:
    """Own a region together with this engine's other ranks, until the file is closed: it has no
    other owner before the last of them has ended.

    Args:
        fd: the file, open for reading.

    Raises:
        BlockingIOError: another process takes the region over.
    """
    if not set_lock(fd, OWNER_BYTE, fcntl.F_RDLCK):
        raise BlockingIOError(errno.EAGAIN, "another process takes the region over")


def _lock(fd: int) -> int | None:
    lock = _locked(fd, OWNER_BYTE)
    if lock is not None:
        own_together(lock)
    return lock


def _locked(fd: int, byte: int) -> int | None:
    """Lock a byte of a file by a description of its own, which is returned; None if another process
    holds the lock."""
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    if set_lock(own, byte, fcntl.F_WRLCK):
        return own
    os.close(own)
    return None
