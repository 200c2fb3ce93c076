"""A region as its readers see it: the table of the blocks that one engine shares.

The protocol between an owner and its readers is in docs/ipc.md. The owner of a block raises its
generation before it overwrites it, and then looks at the pins of all readers; a reader sets its pin
and then looks at the generation again. Between the two steps of each lies a fence, so that one of
them sees the other.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
from pathlib import Path
from typing import Any

from shmllm.errors import ProtocolMismatchError
from shmllm.ipc.segment import is_locked
from shmllm.ipc.words import Word, WordTable
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
from shmllm.sigbus import bus_guard


class Region:
    """A region, whoever owns it.

    Args:
        fd: the file; the region closes it.
        path: its path, for messages.
        place: its place in the folder.
        writable: whether the tables are mapped for writing, too.

    Attributes:
        layout: its layout.
        place, path: as given.

    Raises:
        ProtocolMismatchError: it is no region of this version, or damaged.
    """

    def __init__(self, fd: int, path: Path, place: int, *, writable: bool = False) -> None:
        self.fd, self.path, self.place = fd, path, place
        self.layout = layout = read_layout(fd, path)
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
        fd = open_regular(path, os.O_RDONLY)
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
        return sum(1 for each in self._generations[section].load_all() if is_valid(each))

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
            if self._key(section, block) == key and is_valid(
                self._generations[section].load(block)
            ):
                return block
        return None

    def generation(self, section: int, block: int) -> int:
        """The generation of a block; an odd number: it cannot be read."""
        return self._generations[section].load(block)

    def has_key(self, section: int, block: int, key: bytes) -> bool:
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


def read_layout(fd: int, path: Path) -> RegionLayout:
    """Read the layout of a region.

    Args:
        fd: the file.
        path: its path, for messages.

    Raises:
        ProtocolMismatchError: it is no region of this version, or damaged.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise ProtocolMismatchError(f"{path} is no region: it is no regular file")
    size = status.st_size
    if size < TABLES_OFFSET:
        raise ProtocolMismatchError(f"{path} is damaged: it has {size} bytes")
    head = memoryview(os.pread(fd, TABLES_OFFSET, 0)).cast("Q")
    layout = RegionLayout.from_header(head, str(path))
    if size != layout.data_offset + layout.data_bytes:
        raise ProtocolMismatchError(f"{path} is damaged: it has {size} bytes")
    return layout


def is_valid(generation: int) -> bool:
    """Whether a block of a generation can be read."""
    return generation != 0 and generation % 2 == 0


def next_valid(generation: int) -> int:
    """The next generation with which a block can be read. Only damage lets it begin again."""
    return ((generation | 1) + 1) % 2**64 or 2


def open_regular(path: Path, access: int) -> int:
    """Open a file. A FIFO would block without O_NONBLOCK, which changes nothing else."""
    return os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
