"""The blocks that engines share, as a GPU copies them.

Regions are host memory. All copies go to the device's one stream: they see what the steps launched
before have written, and the steps launched later see them. A block is gathered from the buffers of
all layers, and copied to the region in one piece: in a region it has one buffer. This module must
not know steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from shmllm.core.shared_blocks import BlockCopy
from shmllm.shared_kv.layout import RegionLayout
from shmllm.worker.gpu.device import Device
from shmllm.worker.gpu.mapped_region import MappedRegion
from shmllm.worker.gpu.transfers import Transfers
from shmllm.worker.id_ranges import RegionIds

STAGED_BYTES = 32 * 2**20
NUM_IDS = 2**30
"""The number of ids of blocks of regions, which no kernel ever gets."""


def staged_bytes(block_bytes: int, state_bytes: int) -> int:
    """Return the size of the device memory that blocks are gathered in.

    Args:
        block_bytes: the size of a block of keys and values, in all layers.
        state_bytes: that of a block of states.
    """
    return max(STAGED_BYTES, block_bytes, state_bytes)


class GpuSharedCache:
    """Maps regions, and launches copies of blocks from and to them.

    Args:
        blocks: for each section the engine's blocks, [num_blocks, buffers, integers]; None: there
            are none.
        staging: (staged_bytes,) uint8 on the device.
        device: the device.

    Attributes:
        is_in_place: False: no step reads blocks of regions by their ids.
    """

    is_in_place = False

    def __init__(self, blocks: Sequence[Tensor | None], staging: Tensor, device: Device) -> None:
        self._device = device
        self._transfers = Transfers(device)
        self._blocks = blocks
        self._staged = [None if each is None else _rows(staging, each) for each in blocks]
        firsts = [0 if each is None else len(each) for each in blocks]
        self._ids = RegionIds([(first, NUM_IDS) for first in firsts])
        self._mapped: dict[tuple[int, ...], MappedRegion] = {}

    @property
    def mapped_bytes(self) -> int:
        """The size of all that is mapped."""
        return sum(each.layout.data_bytes for each in self._mapped.values())

    @property
    def pinned_bytes(self) -> int:
        """How much of it the driver has registered."""
        return sum(each.pinned_bytes for each in self._mapped.values())

    def map(self, fd: int, layout: RegionLayout) -> tuple[int, ...]:
        """See `shared_kv.peers.BlockMemory.map`."""
        firsts = self._ids.take(layout)
        try:
            self._mapped[firsts] = MappedRegion(fd, layout, self._device)
        except OSError:
            self._ids.give_back(firsts)
            raise
        return firsts

    def unmap(self, firsts: Sequence[int]) -> None:
        """See `shared_kv.peers.BlockMemory.unmap`."""
        mapped = self._mapped.pop(tuple(firsts))
        mapped.close()
        self._ids.give_back(firsts)

    def save(self, copies: Sequence[BlockCopy]) -> None:
        """Launch copies of blocks of the engine into a region that is open for writing."""
        for section, part in self._parts(copies):
            blocks, staged = self._memory(section, len(part))
            torch.index_select(blocks, 0, self._send([each.source for each in part]), out=staged)
            for copy, block in zip(part, _bytes_of(staged), strict=True):
                self._block(section, copy.target).copy_(block, non_blocking=True)

    def load(self, copies: Sequence[BlockCopy]) -> None:
        """Launch copies of blocks of regions into those of the engine. The blocks must not change
        until the device has made them."""
        for section, part in self._parts(copies):
            blocks, staged = self._memory(section, len(part))
            for copy, block in zip(part, _bytes_of(staged), strict=True):
                block.copy_(self._block(section, copy.source), non_blocking=True)
            blocks.index_copy_(0, self._send([each.target for each in part]), staged)

    def _parts(self, copies: Sequence[BlockCopy]) -> Iterator[tuple[int, list[BlockCopy]]]:
        """Yield each section with as many of its copies as there is staging memory for."""
        for section, staged in enumerate(self._staged):
            own = [copy for copy in copies if copy.section == section]
            if staged is not None:
                for begin in range(0, len(own), len(staged)):
                    yield section, own[begin : begin + len(staged)]

    def _memory(self, section: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the engine's blocks of a section, and staging memory for some."""
        blocks, staged = self._blocks[section], self._staged[section]
        assert blocks is not None
        assert staged is not None
        return blocks, staged[:count]

    def _send(self, ids: list[int]) -> Tensor:
        (sent,) = self._transfers.send(np.array(ids, np.int64))
        return sent

    def _block(self, section: int, block_id: int) -> Tensor:
        for firsts, mapped in self._mapped.items():
            number = block_id - firsts[section]
            if 0 <= number < mapped.layout.sections[section].num_blocks:
                return mapped.block(section, number)
        raise AssertionError(f"no region has block {block_id}")


def _rows(staging: Tensor, blocks: Tensor) -> Tensor:
    """Return staging memory as rows of blocks, [rows, buffers, integers]."""
    _, *shape = blocks.shape
    block_bytes = blocks[0].numel() * blocks.itemsize
    rows = len(staging) // block_bytes
    return staging[: rows * block_bytes].view(blocks.dtype).view(rows, *shape)


def _bytes_of(blocks: Tensor) -> Tensor:
    """Return the bytes of staged blocks, [count, block_bytes] uint8."""
    return blocks.flatten(1).view(torch.uint8)
