"""Who owns the file of a region: making, adopting and removing it, and its locks.

The owner holds a lock on one byte of the file, which ends with its process. Who adopts or removes a
region whose owner has ended holds a second lock meanwhile, so that nobody removes what another
adopts.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

from shmllm.errors import SegmentError
from shmllm.ipc.folder import link
from shmllm.ipc.segment import OWNER_BYTE, SWEEPER_BYTE, is_locked, set_lock
from shmllm.ipc.segment_file import allocate, resize
from shmllm.shared_kv.folder import region_path
from shmllm.shared_kv.layout import NUM_PLACES, RegionLayout
from shmllm.shared_kv.own_region import OwnRegion
from shmllm.shared_kv.region import open_regular, read_layout


def create(
    folder: Path, layout: RegionLayout, places: Iterable[int] = range(NUM_PLACES)
) -> OwnRegion:
    """Make a region and give it a name.

    Args:
        folder: the folder.
        layout: its layout.
        places: the places that it may get; it gets the first that is free.

    Raises:
        FileExistsError: all are taken.
        FileNotFoundError: there is no such folder.
        NoSpaceError: shared memory is full.
    """
    free = [each for each in places if not os.path.lexists(region_path(folder, each))]
    if not free:
        raise FileExistsError(errno.EEXIST, "all places are taken", str(folder))
    with ExitStack() as undo:
        fd = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        undo.callback(os.close, fd)
        resize(fd, layout.data_offset + layout.data_bytes)
        allocate(fd, 0, layout.pins_offset)
        if layout.data_bytes:
            allocate(fd, layout.data_offset, layout.data_bytes)
        words = b"".join(word.to_bytes(8, "little") for word in layout.header())
        os.pwrite(fd, words, 0)
        lock = _lock(fd)
        assert lock is not None, "nobody else has the file"
        undo.callback(os.close, lock)
        place = _link(fd, folder, free)
        region = OwnRegion(fd, region_path(folder, place), place, lock)
        undo.pop_all()  # the region closes them
    return region


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
    with ExitStack() as undo:
        fd = open_regular(path, os.O_RDWR)
        undo.callback(os.close, fd)
        sweeping = lock_sweeper(fd)
        if sweeping is None:
            return None
        try:
            found = read_layout(fd, path)
            has_shape = found.shape == layout.shape and found.data_bytes > 0
            if not has_shape or (found != layout and not is_any_size):
                return None
            lock = _lock(fd)
            if lock is None:
                return None
            undo.callback(os.close, lock)
            if not os.fstat(fd).st_nlink:  # its owner took the name away before it ended
                return None
        finally:
            os.close(sweeping)
        region = OwnRegion(fd, path, place, lock)
        undo.pop_all()  # the region closes them
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


def _link(fd: int, folder: Path, places: Iterable[int]) -> int:
    """Give an unnamed file its name at the first place that is free. Returns the place."""
    for place in places:
        with suppress(FileExistsError):
            link(fd, region_path(folder, place))
            return place
    raise FileExistsError(errno.EEXIST, "all places are taken", str(folder))


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
