"""The region that this process owns, and by which it reads the blocks of others.

This module must not know which block is worth keeping.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shmllm.ipc.segment_file import allocate
from shmllm.ipc.words import IS_STORE_ORDERED, fence
from shmllm.shared_kv.layout import (
    DESCRIPTION_BYTES,
    DESCRIPTION_OFFSET,
    KEY_BYTES,
    WAYS,
)
from shmllm.shared_kv.memory_calls import free_part, map_memory
from shmllm.shared_kv.region import Region, is_valid, next_valid


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
            if is_valid(generation)
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
        table.store(block, next_valid(table.load(block)))
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
        table.store(block, next_valid(table.load(block)))

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
            free_part(self.fd, at, count * size)

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
        if not is_valid(generation) or not other.has_key(section, block, key):
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
        access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        map_memory(len(self._mapping), access, flags, at=address)


_own_regions: weakref.WeakSet[OwnRegion] = weakref.WeakSet()


def _abandon_all_in_child() -> None:
    for region in list(_own_regions):
        region._abandon_in_child()


os.register_at_fork(after_in_child=_abandon_all_in_child)
