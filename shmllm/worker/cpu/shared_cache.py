"""The blocks that engines share, as a process that computes on a CPU reads and writes them.

A rank of a group has a part of each block: some of the buffers of a region. This module must not
know the other ranks, which `group_shared_cache` has.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from shmllm.errors import SegmentError
from shmllm.shared_kv.layout import RegionLayout
from shmllm.shared_kv.memory_calls import POPULATE_READ
from shmllm.shared_kv.region_files import own_together
from shmllm.worker.arrays import LongArray
from shmllm.worker.cpu.roomy_arena import MOST_IDS, RoomyArena
from shmllm.worker.group import Group

Bytes = npt.NDArray[np.uint8]
MOST_COPIES = 1024
"""How many blocks are copied at a time."""
MANY_COPIES = 16
"""From how many blocks on several threads copy."""


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A region that is mapped.

    fd: its file, which this owns.
    layout: its layout.
    offsets: for each section the offset in the file of each of this process's buffers.
    views: if it is copied from, for each section the parts of all blocks in each of them.
    """

    fd: int
    layout: RegionLayout
    offsets: list[list[int]]
    views: list[list[Bytes]] | None


class CpuSharedCache:
    """Maps regions, and copies blocks from and to them.

    Args:
        buffers: for each section this process's tensors of blocks, [num_blocks, part_bytes] each.
        arena: the arena of these tensors, behind which regions are mapped; None: their blocks are
            only copied.
        group: the group of which this process is a rank. Each has a part of the blocks.
        num_threads: the number of threads that copy.

    Attributes:
        copies: (MOST_COPIES, 3) int64, the section, the source and the target of each copy that
            `copy` makes. All ranks share these words, as the following.
        num_copies: (1,) int64, their number.
        are_loads: (1,) int64, whether they are copies of blocks of regions into those of the
            engine. Else they are copies of the engine's blocks into its region.
        is_in_place: whether steps read the blocks of regions by their ids.
        ids: for each section the first id that blocks of regions may have, and how many there are;
            the same in all ranks.
    """

    def __init__(
        self,
        buffers: Sequence[Sequence[Tensor]],
        arena: RoomyArena | None,
        group: Group,
        num_threads: int = 1,
    ) -> None:
        self._num_threads = num_threads
        self._own: list[list[Bytes]] = [[each.numpy() for each in section] for section in buffers]
        self._rank = group.rank
        self.copies: LongArray = group.array("copies of blocks", MOST_COPIES, 3)
        self.num_copies: LongArray = group.array("number of copies of blocks", 1)
        self.are_loads: LongArray = group.array("copies of blocks are loads", 1)
        self.is_in_place = arena is not None
        self._mapped: dict[tuple[int, ...], _Mapped] = {}
        begins = [0, len(buffers[0])]
        self._tensors = [
            [] if arena is None else arena.tensors[begin : begin + len(group)]
            for begin, group in zip(begins, buffers, strict=True)
        ]
        self.ids = [
            (tensors[0].first, tensors[0].room)
            if tensors
            else (len(group[0]) if group else 0, MOST_IDS)
            for tensors, group in zip(self._tensors, buffers, strict=True)
        ]

    @property
    def mapped_bytes(self) -> int:
        """The size of all that is mapped."""
        return sum(
            len(own) * section.buffer_bytes
            for mapped in self._mapped.values()
            for own, section in zip(self._own, mapped.layout.sections, strict=True)
        )

    def reads_in_place(self) -> bool:
        """Return `is_in_place`."""
        return self.is_in_place

    def use_copies(self) -> None:
        """Only copy blocks from now on. Called before anything is mapped."""
        self.is_in_place = False

    def map(
        self, path: str, is_writable: bool, layout: RegionLayout, firsts: tuple[int, ...]
    ) -> None:
        """Provide this process's part of the data of a region.

        Args:
            path: a path of the file, which may be one that only exists now.
            is_writable: whether it is the region of this engine.
            layout: its layout.
            firsts: for each section the id of its first block.

        Raises:
            SegmentError: it cannot be mapped.
        """
        try:
            fd = os.open(path, (os.O_RDWR if is_writable else os.O_RDONLY) | os.O_CLOEXEC)
            try:
                if is_writable and self._rank:
                    own_together(fd)  # else, when rank 0 dies, another owner and this one write
                self._map(fd, layout, firsts)
            except BaseException:
                os.close(fd)
                raise
        except OSError as problem:
            raise SegmentError(problem.strerror) from problem

    def _map(self, fd: int, layout: RegionLayout, firsts: tuple[int, ...]) -> None:
        offsets = self._offsets(layout)
        if self.is_in_place:
            try:
                self._map_in_place(fd, layout, offsets, firsts)
            except BaseException:
                self._unmap_in_place(layout, firsts)
                raise
        views = None if self.is_in_place else _views(fd, layout, offsets)
        # A new dictionary: the thread that computes steps iterates over the old one.
        self._mapped = {**self._mapped, firsts: _Mapped(fd, layout, offsets, views)}

    def unmap(self, firsts: tuple[int, ...]) -> None:
        """End that. Idempotent."""
        mapped = self._mapped.get(firsts)
        if mapped is None:
            return
        self._mapped = {key: each for key, each in self._mapped.items() if each is not mapped}
        if self.is_in_place:
            self._unmap_in_place(mapped.layout, firsts)
        os.close(mapped.fd)

    def _unmap_in_place(self, layout: RegionLayout, firsts: tuple[int, ...]) -> None:
        for section, tensors, first in zip(layout.sections, self._tensors, firsts, strict=True):
            for tensor in tensors:
                if section.num_blocks:
                    tensor.unmap(first, section.num_blocks)

    def copy(self) -> None:
        """Make the copies that the words of the group say."""
        copies = self.copies[: int(self.num_copies[0])].tolist()
        make = self._load if self.are_loads[0] else self._save
        if len(copies) < MANY_COPIES or self._num_threads == 1:
            make(copies, slice(None))
            return
        # Each thread copies some buffers of all blocks. Fresh pages cost more than the bytes.
        count = self._num_threads
        with ThreadPoolExecutor(count) as threads:
            done = [
                threads.submit(make, copies, slice(first, None, count)) for first in range(count)
            ]
        for each in done:
            each.result()

    def _save(self, copies: Iterable[list[int]], part: slice) -> None:
        for section, source, target in copies:
            mapped, first = self._region_of(section, target)
            at = (target - first) * mapped.layout.sections[section].part_bytes
            buffers = self._own[section][part]
            for begin, buffer in zip(mapped.offsets[section][part], buffers, strict=True):
                # By a call, not by a mapping: a page of a mapping costs a fault of its own.
                os.pwrite(mapped.fd, buffer[source], begin + at)

    def _load(self, copies: Iterable[list[int]], part: slice) -> None:
        for section, source, target in copies:
            mapped, first = self._region_of(section, source)
            assert mapped.views is not None, "blocks are copied"
            views = mapped.views[section][part]
            for view, buffer in zip(views, self._own[section][part], strict=True):
                buffer[target] = view[source - first]

    def _region_of(self, section: int, block_id: int) -> tuple[_Mapped, int]:
        for firsts, mapped in self._mapped.items():
            first = firsts[section]
            if first <= block_id < first + mapped.layout.sections[section].num_blocks:
                return mapped, first
        raise AssertionError(f"no region has block {block_id}")

    def _offsets(self, layout: RegionLayout) -> list[list[int]]:
        """The offset in a region of each of this process's buffers, which follow those of the ranks
        before it."""
        found = []
        for own, offsets in zip(self._own, layout.buffer_offsets, strict=True):
            begin = self._rank * len(own)
            found.append([layout.data_offset + at for at in offsets[begin : begin + len(own)]])
        return found

    def _map_in_place(
        self, fd: int, layout: RegionLayout, offsets: list[list[int]], firsts: Sequence[int]
    ) -> None:
        sections = zip(layout.sections, offsets, self._tensors, firsts, strict=True)
        for section, places, tensors, first in sections:
            for offset, tensor in zip(places, tensors, strict=True):
                if section.num_blocks:
                    tensor.map(fd, offset, first, section.num_blocks)


def _views(fd: int, layout: RegionLayout, offsets: list[list[int]]) -> list[list[Bytes]]:
    views: list[list[Bytes]] = []
    for section, begins in zip(layout.sections, offsets, strict=True):
        if not begins or not section.num_blocks:
            views.append([])
            continue
        # The buffers of a process lie one behind the other.
        size = len(begins) * section.buffer_bytes
        mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ, offset=begins[0])
        with contextlib.suppress(OSError):  # an older system refuses
            mapping.madvise(POPULATE_READ)
        whole: Any = np.frombuffer(mapping, np.uint8)
        parts = whole.reshape(len(begins), section.num_blocks, section.part_bytes)
        views.append([*parts])
    return views
