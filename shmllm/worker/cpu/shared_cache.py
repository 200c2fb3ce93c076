"""The blocks that engines share, as a CPU reads and writes them."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from shmllm.core.shared_blocks import BlockCopy
from shmllm.shared_kv.layout import RegionLayout
from shmllm.worker.cpu.roomy_arena import MADV_POPULATE_READ, MOST_IDS, RoomyArena
from shmllm.worker.id_ranges import IdRanges

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A region that is mapped.

    fd: its file, which this owns.
    layout: its layout.
    views: if it is copied from, for each section the parts of all blocks in each buffer.
    """

    fd: int
    layout: RegionLayout
    views: list[list[Bytes]] | None


class CpuSharedCache:
    """Maps regions, and copies blocks from and to them.

    Args:
        buffers: for each section the engine's own tensors of blocks, [num_blocks, part_bytes] each.
        arena: the arena of these tensors, behind which regions are mapped; None: their blocks are
            only copied.

    Attributes:
        is_in_place: whether steps read the blocks of regions by their ids.
        mapped_bytes: the size of all that is mapped.
    """

    def __init__(self, buffers: Sequence[Sequence[Tensor]], arena: RoomyArena | None) -> None:
        self._own: list[list[Bytes]] = [[each.numpy() for each in group] for group in buffers]
        self._arena = arena
        self.is_in_place = arena is not None
        self.mapped_bytes = 0
        self._mapped: dict[tuple[int, ...], _Mapped] = {}
        begins = [0, len(buffers[0])]
        self._tensors = [
            [] if arena is None else arena.tensors[begin : begin + len(group)]
            for begin, group in zip(begins, buffers, strict=True)
        ]
        self._ids = [
            IdRanges(tensors[0].first, tensors[0].room)
            if tensors
            else IdRanges(len(group[0]) if group else 0, MOST_IDS)
            for tensors, group in zip(self._tensors, buffers, strict=True)
        ]

    def map(self, fd: int, layout: RegionLayout) -> tuple[int, ...]:
        """See `shared_kv.tier.BlockMemory.map`."""
        firsts = self._take(layout)
        own = os.open(f"/proc/self/fd/{fd}", _flags_of(fd) | os.O_CLOEXEC)
        views = None
        try:
            if self.is_in_place:
                self._map_in_place(own, layout, firsts)
            else:
                views = _views(own, layout)
        except OSError:
            os.close(own)
            self._give_back(firsts)
            raise
        # A new dictionary: the thread that computes steps iterates over the old one.
        self._mapped = {**self._mapped, firsts: _Mapped(own, layout, views)}
        self.mapped_bytes += layout.data_bytes
        return firsts

    def unmap(self, firsts: Sequence[int]) -> None:
        """See `shared_kv.tier.BlockMemory.unmap`."""
        mapped = self._mapped[tuple(firsts)]
        self._mapped = {key: each for key, each in self._mapped.items() if each is not mapped}
        for tensors, first, section in zip(
            self._tensors, firsts, mapped.layout.sections, strict=True
        ):
            for tensor in tensors:
                if section.num_blocks:
                    tensor.unmap(first, section.num_blocks)
        self._give_back(firsts)
        self.mapped_bytes -= mapped.layout.data_bytes
        os.close(mapped.fd)

    def save(self, copies: Iterable[BlockCopy]) -> None:
        """Copy blocks of the engine into a region that is open for writing."""
        for section, source, target in copies:
            mapped, first = self._region_of(section, target)
            size = mapped.layout.sections[section].part_bytes
            at = mapped.layout.data_offset + (target - first) * size
            offsets = mapped.layout.buffer_offsets[section]
            for begin, buffer in zip(offsets, self._own[section], strict=True):
                # By a call, not by a mapping: a page of a mapping costs a fault of its own.
                os.pwrite(mapped.fd, buffer[source], at + begin)

    def load(self, copies: Iterable[BlockCopy]) -> None:
        """Copy blocks of regions into those of the engine."""
        for section, source, target in copies:
            mapped, first = self._region_of(section, source)
            assert mapped.views is not None, "blocks are copied"
            for view, buffer in zip(mapped.views[section], self._own[section], strict=True):
                buffer[target] = view[source - first]

    def _region_of(self, section: int, block_id: int) -> tuple[_Mapped, int]:
        for firsts, mapped in self._mapped.items():
            first = firsts[section]
            if first <= block_id < first + mapped.layout.sections[section].num_blocks:
                return mapped, first
        raise AssertionError(f"no region has block {block_id}")

    def _take(self, layout: RegionLayout) -> tuple[int, ...]:
        firsts: list[int] = []
        for ids, section in zip(self._ids, layout.sections, strict=True):
            first = ids.take(section.num_blocks) if section.num_blocks else 0
            if first is None:
                self._give_back(firsts)
                raise OSError(0, "no block ids are left")
            firsts.append(first)
        return tuple(firsts)

    def _give_back(self, firsts: Sequence[int]) -> None:
        for ids, first in zip(self._ids, firsts, strict=False):
            ids.give_back(first)

    def _map_in_place(self, fd: int, layout: RegionLayout, firsts: Sequence[int]) -> None:
        sections = zip(layout.sections, layout.buffer_offsets, self._tensors, firsts, strict=True)
        for section, offsets, tensors, first in sections:
            for offset, tensor in zip(offsets, tensors, strict=True):
                if section.num_blocks:
                    tensor.map(fd, layout.data_offset + offset, first, section.num_blocks)


def _views(fd: int, layout: RegionLayout) -> list[list[Bytes]]:
    mapping = mmap.mmap(
        fd, layout.data_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=layout.data_offset
    )
    with contextlib.suppress(OSError):  # an older system refuses
        mapping.madvise(MADV_POPULATE_READ)
    whole: Any = np.frombuffer(mapping, np.uint8)
    return [
        [
            whole[begin : begin + section.buffer_bytes].reshape(-1, section.part_bytes)
            for begin in offsets
        ]
        for section, offsets in zip(layout.sections, layout.buffer_offsets, strict=True)
    ]


def _flags_of(fd: int) -> int:
    """Whether a file is open for writing, as flags of `os.open`."""
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
