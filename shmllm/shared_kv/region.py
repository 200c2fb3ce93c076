"""A region: the table of shared blocks of one engine, as its owner and as readers see it.

The protocol between them is in docs/ipc.md. The owner of a block raises its generation before it
overwrites it, and then looks at the pins of all readers; a reader sets its pin and then looks at
the generation again. Between the two steps of each lies a fence, so that one of them sees the
other. This module must not know which block is worth keeping.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import stat
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shmllm.errors import ProtocolMismatchError, SegmentError
from shmllm.ipc import bus_guard, folder
from shmllm.ipc.segment import OWNER_BYTE, SWEEPER_BYTE, is_locked, read_lock, write_lock
from shmllm.ipc.segment_file import allocate, resize
from shmllm.ipc.words import IS_STORE_ORDERED, Word, WordTable, fence
from shmllm.shared_kv.layout import (
    DESCRIPTION_BYTES,
    DESCRIPTION_OFFSET,
    KEY_BYTES,
    NUM_PLACES,
    PINS_OF_OFFSET,
    TABLES_OFFSET,
    WAYS,
    RegionLayout,
)

_PUNCH_HOLE = 3
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE of fallocate(2)."""
_MAP_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)


class Region:
    """A region that another engine owns, or has owned.

    Args:
        fd: the file, open for reading; the region closes it.
        path: its path, for messages.
        place: its place in the folder.

    Attributes:
        layout: its layout.
        place, path: as given.

    Raises:
        ProtocolMismatchError: it is no region of this version, or damaged.
    """

    def __init__(self, fd: int, path: Path, place: int, *, writable: bool = False) -> None:
        self.fd, self.path, self.place = fd, path, place
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ProtocolMismatchError(f"{path} is no region: it is no regular file")
        size = status.st_size
        if size < TABLES_OFFSET:
            raise ProtocolMismatchError(f"{path} is damaged: it has {size} bytes")
        head = memoryview(os.pread(fd, TABLES_OFFSET, 0)).cast("Q")
        self.layout = layout = RegionLayout.from_header(head, str(path))
        if size != layout.data_offset + layout.data_bytes:
            raise ProtocolMismatchError(f"{path} is damaged: it has {size} bytes")
        access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        self._mapping = mmap.mmap(fd, layout.data_offset, mmap.MAP_SHARED, access)
        self._guard = bus_guard.guard(self._mapping)
        self._view = view = memoryview(self._mapping)
        self._generations = [
            WordTable(view, tables.generations, section.num_blocks)
            for tables, section in zip(layout.tables, layout.sections, strict=True)
        ]
        self._keys = [
            view[tables.keys : tables.keys + section.num_blocks * KEY_BYTES]
            for tables, section in zip(layout.tables, layout.sections, strict=True)
        ]
        self._index = [
            view[tables.index : tables.index + section.num_buckets * WAYS * 4].cast("I")
            for tables, section in zip(layout.tables, layout.sections, strict=True)
        ]
        self._pins_of = [Word(view, PINS_OF_OFFSET + 8 * place) for place in range(NUM_PLACES)]

    @classmethod
    def open(cls, path: Path, place: int) -> Region:
        """Map a region for reading.

        Raises:
            FileNotFoundError: there is none.
            OSError: it cannot be opened.
            ProtocolMismatchError: it is damaged, or of another version.
        """
        fd = _open(path, os.O_RDONLY)
        try:
            return cls(fd, path, place)
        except BaseException:
            os.close(fd)
            raise

    @property
    def description(self) -> dict[str, Any]:
        """What the blocks were computed by; empty if it is damaged."""
        text = bytes(self._view[DESCRIPTION_OFFSET : DESCRIPTION_OFFSET + DESCRIPTION_BYTES])
        try:
            found = json.loads(text.rstrip(b"\0"))
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def is_owned(self) -> bool:
        """Whether a living process owns the region."""
        return is_locked(self.fd)

    @property
    def is_removed(self) -> bool:
        """Whether the file has no name any more."""
        return os.fstat(self.fd).st_nlink == 0

    @property
    def is_lost(self) -> bool:
        """Whether the file was truncated."""
        return self._guard is not None and self._guard.is_lost

    def num_valid(self, section: int) -> int:
        """The number of blocks that can be read."""
        return sum(1 for each in self._generations[section].load_all() if _is_valid(each))

    def find(self, section: int, key: bytes) -> int | None:
        """Return the block that has a key now, or None. Another call may find it reused.

        Raises:
            ProtocolMismatchError: the index is damaged.
        """
        num_blocks = self.layout.sections[section].num_blocks
        begin = self._bucket(section, key)
        for number in self._index[section][begin : begin + WAYS].tolist():
            if not number:
                continue
            if number > num_blocks:
                raise ProtocolMismatchError(
                    f"{self.path} is damaged: its index has block {number - 1:,} of {num_blocks:,}"
                )
            block = number - 1
            if self._key(section, block) == key and _is_valid(
                self._generations[section].load(block)
            ):
                return block
        return None

    def generation(self, section: int, block: int) -> int:
        """The generation of a block; an odd number: it cannot be read."""
        return self._generations[section].load(block)

    def has(self, section: int, block: int, key: bytes) -> bool:
        """Whether a block has a key, valid or not."""
        return self._key(section, block) == key

    def pins(self, place: int, section: int, block: int) -> bool:
        """Whether the owner of this region reads a block of the region at a place."""
        is_pinned = (
            self._pins_of[place].load() != 0  # else its pins have no memory
            and self._view[self.layout.pins(place, section) + block] != 0
        )
        return is_pinned or self.is_lost  # then the file was truncated, and zeros were read

    def close(self) -> None:
        """Unmap the file and close it; the lock of an owner ends."""
        for table in self._generations:
            table.close()
        for word in self._pins_of:
            word.close()
        for view in (*self._keys, *self._index):
            view.release()
        self._view.release()
        self._mapping.close()
        os.close(self.fd)

    def _key(self, section: int, block: int) -> bytes:
        return bytes(self._keys[section][block * KEY_BYTES : (block + 1) * KEY_BYTES])

    def _bucket(self, section: int, key: bytes) -> int:
        """The first entry of the bucket of a key."""
        mask = self.layout.sections[section].num_buckets - 1
        return (int.from_bytes(key[:8], "little") & mask) * WAYS


class OwnRegion(Region):
    """The region that this process owns.

    Args:
        fd: the file, open for reading and writing.
        path: its path.
        place: its place.
        lock: another description of the file, which is locked; the region closes it.
    """

    def __init__(self, fd: int, path: Path, place: int, lock: int) -> None:
        super().__init__(fd, path, place, writable=True)
        self._lock = lock
        _own_regions.add(self)

    def entries(self, section: int) -> list[tuple[int, bytes]]:
        """The valid blocks and their keys."""
        generations = self._generations[section].load_all()
        return [
            (block, self._key(section, block))
            for block, generation in enumerate(generations)
            if _is_valid(generation)
        ]

    def invalidated(self, section: int) -> list[int]:
        """The blocks that had contents and are not valid now."""
        generations = self._generations[section].load_all()
        return [block for block, generation in enumerate(generations) if generation % 2]

    def publish(self, section: int, block: int, key: bytes) -> bool:
        """Let others find a block, whose data was written after `invalidate` or before any
        publication.

        Returns:
            False if the index has no room for the key; nothing changed.
        """
        index, begin = self._index[section], self._bucket(section, key)
        bucket = index[begin : begin + WAYS].tolist()
        if 0 not in bucket:
            return False
        begin_key = block * KEY_BYTES
        self._keys[section][begin_key : begin_key + KEY_BYTES] = key
        index[begin + bucket.index(0)] = block + 1
        table = self._generations[section]
        # SYNC POINT: after the data and the key
        table.store(block, _next_valid(table.load(block)))
        return True

    def invalidate(self, section: int, block: int) -> None:
        """Let nobody else begin to read a block. Others may still read it: the caller then looks
        at their pins, and calls `restore` or `forget`."""
        table = self._generations[section]
        table.store(block, table.load(block) | 1)
        fence()  # SYNC POINT: a reader sets its pin before, or sees this generation

    def restore(self, section: int, block: int) -> None:
        """Undo `invalidate`: the block has its contents still."""
        table = self._generations[section]
        table.store(block, _next_valid(table.load(block)))

    def forget(self, section: int, block: int) -> None:
        """Take an invalid block out of the index: it may be overwritten."""
        begin = self._bucket(section, self._key(section, block))
        index = self._index[section]
        for entry in range(begin, begin + WAYS):
            if index[entry] == block + 1:
                index[entry] = 0

    def rebuild_index(self) -> None:
        """Make the index anew: an owner that was killed may have left entries of other keys."""
        for section, index in enumerate(self._index):
            fresh = [0] * len(index)
            for block, key in self.entries(section):
                begin = self._bucket(section, key)
                bucket = fresh[begin : begin + WAYS]
                if 0 in bucket:
                    fresh[begin + bucket.index(0)] = block + 1
            # One by one: others read the index meanwhile, and need whole entries.
            for entry, (old, new) in enumerate(zip(index.tolist(), fresh, strict=True)):
                if old != new:
                    index[entry] = new

    def give_memory_back(self, section: int, first: int, count: int) -> None:
        """Free the memory of adjacent blocks that are not valid. They read as zeros then."""
        size = self.layout.sections[section].part_bytes
        for begin in self.layout.buffer_offsets[section]:
            at = self.layout.data_offset + begin + first * size
            _libc.fallocate(
                self.fd, _PUNCH_HOLE, ctypes.c_long(at), ctypes.c_long(count * size)
            )  # a refusal keeps the memory, no more

    def keep_pins_of(self, other: Region) -> None:
        """Provide memory for pins of another region's blocks, none of which is pinned yet.

        Raises:
            NoSpaceError: shared memory is full.
        """
        for section, each in enumerate(other.layout.sections):
            if each.num_blocks:
                begin = self.layout.pins(other.place, section)
                allocate(self.fd, begin, each.num_blocks)
                self._view[begin : begin + each.num_blocks] = bytes(each.num_blocks)
        self._pins_of[other.place].store(1)

    def drop_pins_of(self, place: int) -> None:
        """Nobody at a place is read any more."""
        self._pins_of[place].store(0)

    def pin(self, other: Region, section: int, block: int, key: bytes) -> bool:
        """Begin to read a block of another region that `find` has found. Returns False if its owner
        has reused it meanwhile."""
        generation = other.generation(section, block)
        if not _is_valid(generation) or not other.has(section, block, key):
            return False
        at = self.layout.pins(other.place, section) + block
        self._view[at] = 1
        fence()  # SYNC POINT: the owner sees the pin, or this process sees its generation
        if other.generation(section, block) == generation:
            return True
        self._view[at] = 0
        return False

    def unpin(self, place: int, section: int, block: int) -> None:
        """End to read a block of the region at a place."""
        if not IS_STORE_ORDERED:
            fence()  # SYNC POINT: the reads of the block come first
        self._view[self.layout.pins(place, section) + block] = 0

    def describe(self, description: Mapping[str, Any]) -> None:
        """Write what the blocks are computed by."""
        text = json.dumps(description).encode()[:DESCRIPTION_BYTES]
        text = text.ljust(DESCRIPTION_BYTES, b"\0")
        self._view[DESCRIPTION_OFFSET : DESCRIPTION_OFFSET + DESCRIPTION_BYTES] = text

    def touch(self) -> None:
        """Let the file's time of modification say that the region is used now. Nothing else does:
        memory is written without the file system."""
        os.utime(self.fd)

    def unlink(self) -> None:
        """Take the region's name away, if it has it still."""
        with suppress(FileNotFoundError):
            if os.lstat(self.path).st_ino == os.fstat(self.fd).st_ino:
                os.unlink(self.path)

    def close(self) -> None:
        _own_regions.discard(self)
        super().close()
        os.close(self._lock)

    def _abandon_in_child(self) -> None:
        """A forked child would keep the lock after its parent's end, and its objects would change
        pins and blocks that are the parent's: from now on they change zeros of the child."""
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in (self.fd, self._lock):
            os.dup2(null, fd, inheritable=False)
        os.close(null)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        size, access = len(self._mapping), mmap.PROT_READ | mmap.PROT_WRITE
        _libc.mmap(
            ctypes.c_void_p(address),
            ctypes.c_size_t(size),
            access,
            mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED,
            -1,
            ctypes.c_long(0),
        )


_own_regions: weakref.WeakSet[OwnRegion] = weakref.WeakSet()


def _abandon_all_in_child() -> None:
    for region in list(_own_regions):
        region._abandon_in_child()


os.register_at_fork(after_in_child=_abandon_all_in_child)


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


def adopt(path: Path, place: int, layout: RegionLayout) -> OwnRegion | None:
    """Become the owner of a region whose owner has ended. Its valid blocks stay valid, and readers
    go on reading them.

    Returns:
        None if it has an owner, another layout, or is being removed.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be opened.
        ProtocolMismatchError: it is damaged, or of another version.
    """
    fd = _open(path, os.O_RDWR)
    try:
        sweeping = lock_sweeper(fd)
        lock = None
        if sweeping is not None:
            try:
                if os.fstat(fd).st_nlink:
                    lock = _lock(fd)
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
    if region.layout != layout:
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
        fd = _open(path, os.O_RDWR)
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
    fd = _open(path, os.O_RDONLY)
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
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, read_lock(OWNER_BYTE))


def _lock(fd: int) -> int | None:
    lock = _locked(fd, OWNER_BYTE)
    if lock is not None:
        own_together(lock)
    return lock


def _locked(fd: int, byte: int) -> int | None:
    """Lock a byte of a file by a description of its own, which is returned; None if another process
    holds the lock."""
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.fcntl(own, fcntl.F_OFD_SETLK, write_lock(byte))
        return own
    except (BlockingIOError, PermissionError):
        os.close(own)
        return None
    except BaseException:
        os.close(own)
        raise


def _open(path: Path, access: int) -> int:
    """Open a file. A FIFO would block without O_NONBLOCK, which changes nothing else."""
    return os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def _is_valid(generation: int) -> bool:
    return generation != 0 and generation % 2 == 0


def _next_valid(generation: int) -> int:
    """The next generation with which a block can be read. Only damage lets it begin again."""
    return ((generation | 1) + 1) % 2**64 or 2
