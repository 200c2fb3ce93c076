"""Regions of a shared prefix cache for tests without a model: layouts, keys, and block memory."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from shmllm.core.shared_blocks import BlockCopy
from shmllm.shared_kv.layout import RegionLayout, Section
from shmllm.shared_kv.own_region import OwnRegion
from shmllm.shared_kv.region_files import create
from shmllm.shared_kv.tier import SharedTier
from shmllm.worker.id_ranges import IdRanges

PART_BYTES = 512
NUM_BUFFERS = 2
NO_STATES = Section(0, 0, 0)
FIRST_ID = 1000
"""The first id of a block of a region: those of an engine's own blocks are smaller."""


def layout_of(num_blocks: int = 16, num_states: int = 0) -> RegionLayout:
    """The layout of small regions; both numbers are multiples of 8."""
    states = Section(num_states, 1, PART_BYTES) if num_states else NO_STATES
    return RegionLayout((Section(num_blocks, NUM_BUFFERS, PART_BYTES), states))


@contextmanager
def new_region(layout: RegionLayout) -> Iterator[OwnRegion]:
    """A region in a directory of its own, in shared memory."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        own = create(folder, layout, [0])
        yield own
        own.close()
    finally:
        shutil.rmtree(folder)


def key_of(name: object) -> bytes:
    """The key that stands for a name."""
    return hashlib.sha256(repr(name).encode()).digest()


def data_of(section: int, key: bytes, buffer: int) -> bytes:
    """What a block of this key has in a buffer."""
    return hashlib.sha256(key + bytes((section, buffer))).digest() * (PART_BYTES // 32)


class FileMemory:
    """A `BlockMemory` that reads and writes the files of regions by calls.

    Attributes:
        num_mapped: the regions that are mapped now.
    """

    def __init__(self) -> None:
        self._ids = [IdRanges(FIRST_ID, 2**20) for _ in range(2)]
        self._mapped: dict[tuple[int, ...], tuple[int, RegionLayout]] = {}

    @property
    def num_mapped(self) -> int:
        return len(self._mapped)

    def map(self, fd: int, layout: RegionLayout) -> tuple[int, ...]:
        firsts = []
        for ids, section in zip(self._ids, layout.sections, strict=True):
            first = ids.take(section.num_blocks) if section.num_blocks else 0
            assert first is not None
            firsts.append(first)
        self._mapped[tuple(firsts)] = os.dup(fd), layout
        return tuple(firsts)

    def unmap(self, firsts: Sequence[int]) -> None:
        fd, _ = self._mapped.pop(tuple(firsts))
        os.close(fd)
        for ids, first in zip(self._ids, firsts, strict=True):
            ids.give_back(first)

    def write(self, section: int, block_id: int, key: bytes) -> None:
        """Write what a block of this key has."""
        for buffer, (fd, offset) in enumerate(self._parts(section, block_id)):
            os.pwrite(fd, data_of(section, key, buffer), offset)

    def has(self, section: int, block_id: int, key: bytes) -> bool:
        """Whether a block has what a block of this key has."""
        return all(
            os.pread(fd, PART_BYTES, offset) == data_of(section, key, buffer)
            for buffer, (fd, offset) in enumerate(self._parts(section, block_id))
        )

    def close(self) -> None:
        for firsts in [*self._mapped]:
            self.unmap(firsts)

    def _parts(self, section: int, block_id: int) -> list[tuple[int, int]]:
        for firsts, (fd, layout) in self._mapped.items():
            block = block_id - firsts[section]
            if 0 <= block < layout.sections[section].num_blocks:
                begin = layout.data_offset + block * PART_BYTES
                return [(fd, begin + offset) for offset in layout.buffer_offsets[section]]
        raise AssertionError(f"no region has block {block_id}")


class Member:
    """An engine of a folder, without the engine.

    Args:
        region: its region, or the path of one to create.
        layout: the layout of a new region.

    Attributes:
        problems: what the tier has reported.
    """

    def __init__(self, region: OwnRegion | Path, layout: RegionLayout | None = None) -> None:
        if isinstance(region, Path):
            region = create(region.parent, layout or layout_of(), [int(region.name)])
        self.region = region
        self.memory = FileMemory()
        self.problems: list[str] = []
        self.tier = SharedTier(region, self.memory, self.problems.append)

    def save(self, *names: object, section: int = 0) -> list[bool]:
        """Share blocks. Returns which of them were written."""
        keys = [key_of(name) for name in names]
        ids = self.tier.reserve([(section, key) for key in keys])
        for block_id, key in zip(ids, keys, strict=True):
            if block_id is not None:
                self.memory.write(section, block_id, key)
                self.tier.publish(section, block_id)
        return [block_id is not None for block_id in ids]

    def borrow(self, name: object, section: int = 0) -> int | None:
        """Borrow a block and check what it has."""
        block_id = self.tier.borrow(section, key_of(name))
        assert block_id is None or self.memory.has(section, block_id, key_of(name))
        return block_id

    def finds(self, name: object, section: int = 0) -> bool:
        """Whether any region has a block."""
        self.tier.refresh()
        return self.tier.contains(section, key_of(name))

    def close(self) -> None:
        self.tier.close()
        assert self.memory.num_mapped == 0


class FakeSharedBlocks:
    """The shared blocks of the core, in memory: blocks of "others", and those that it is given.

    Attributes:
        others: the blocks of other engines, by section and key.
        lent: how often each id is lent now.
        reserved, published: the keys of ids.
        vanishing: keys that `contains` knows and `borrow` does not.
        room: how many blocks can still be reserved.
    """

    def __init__(self, room: int = 100) -> None:
        self.others: dict[tuple[int, bytes], int] = {}
        self.lent: dict[tuple[int, int], int] = {}
        self.reserved: dict[int, tuple[int, bytes]] = {}
        self.published: dict[int, tuple[int, bytes]] = {}
        self.vanishing: set[tuple[int, bytes]] = set()
        self.room = room
        self.num_refreshed = 0
        self._next_id = FIRST_ID

    def put(self, section: int, key: bytes) -> int:
        """Let another engine have a block."""
        self._next_id += 1
        self.others[section, key] = self._next_id
        return self._next_id

    def refresh(self) -> None:
        self.num_refreshed += 1

    def contains(self, section: int, key: bytes) -> bool:
        return (section, key) in self.others

    def borrow(self, section: int, key: bytes) -> int | None:
        if (section, key) in self.vanishing:
            self.vanishing.remove((section, key))
            del self.others[section, key]
            return None
        block_id = self.others.get((section, key))
        if block_id is not None:
            assert (section, block_id) not in self.lent, "a lent block is borrowed again"
            self.lent[section, block_id] = 1
        return block_id

    def give_back(self, section: int, block_id: int) -> None:
        del self.lent[section, block_id]

    def reserve(self, wanted: list[tuple[int, bytes]]) -> list[int | None]:
        ids: list[int | None] = []
        for section, key in wanted:
            if self.contains(section, key) or len(self.reserved) == self.room:
                ids.append(None)
                continue
            self._next_id += 1
            self.reserved[self._next_id] = section, key
            ids.append(self._next_id)
        return ids

    def publish(self, section: int, block_id: int) -> None:
        key = self.reserved[block_id]
        assert key[0] == section
        self.published[block_id] = key
        self.others[key] = block_id


def copies(*wanted: tuple[int, int, int]) -> list[BlockCopy]:
    return [BlockCopy(*each) for each in wanted]
