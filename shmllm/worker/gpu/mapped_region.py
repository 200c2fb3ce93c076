"""The data of a region of shared memory, as a device copies from and to it.

A thread registers the memory with the driver, piece by piece: the kernel zeroes each page that
nobody has used yet, at a few GB/s, and then pins it. Until a piece is registered, and if the driver
refuses it, copies of its blocks make the host wait.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shmllm.shared_kv.layout import RegionLayout, Section
from shmllm.shared_kv.memory_calls import POPULATE_READ, POPULATE_WRITE, advise, is_writable
from shmllm.worker.gpu.device import Device

logger = logging.getLogger(__name__)

PIECE_BYTES = 64 * 2**20
READY_S = 0.5
"""How long a new `MappedRegion` waits for the registration, in seconds: a small one is complete."""


class MappedRegion:
    """
    Args:
        fd: the file, which may be closed afterwards.
        layout: its layout, with one buffer in each section.
        device: the device.

    Attributes:
        layout: as given.
        pinned_bytes: how much of it is registered.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, fd: int, layout: RegionLayout, device: Device) -> None:
        self.layout = layout
        self.pinned_bytes = 0
        self._device = device
        self._is_writable = is_writable(fd)
        access = mmap.PROT_READ | (mmap.PROT_WRITE if self._is_writable else 0)
        self._mapping = mmap.mmap(
            fd, layout.data_bytes, mmap.MAP_SHARED, access, offset=layout.data_offset
        )
        self._per_piece = [_blocks_per_piece(each) for each in layout.sections]
        self._pieces: list[list[Tensor]] = [[] for _ in layout.sections]
        self._cut()
        self._is_closing, self._is_ready = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._pin, name="shmllm-pin", daemon=True)
        self._thread.start()
        self._is_ready.wait(READY_S)

    def block(self, section: int, number: int) -> Tensor:
        """Return a block, [block_bytes] uint8."""
        piece, row = divmod(number, self._per_piece[section])
        return self._pieces[section][piece][row]

    def close(self) -> None:
        """End the registration. The mapping ends with the last tensor; no copy is under way."""
        self._is_closing.set()
        self._thread.join()
        self._pieces.clear()

    def _cut(self) -> None:
        """Make a tensor of each piece: a copy must not touch two registered ranges."""
        pages: Any = np.frombuffer(self._mapping, np.uint8)
        begin = int(pages.ctypes.data)
        for section, per_piece, pieces in zip(
            self.layout.sections, self._per_piece, self._pieces, strict=True
        ):
            for first in range(0, section.num_blocks, per_piece):
                count = min(per_piece, section.num_blocks - first)
                num_bytes = count * section.block_bytes
                memory: Any = (ctypes.c_uint8 * num_bytes).from_address(begin)
                memory.pages = pages  # the tensor keeps the mapping
                pieces.append(torch.frombuffer(memory, dtype=torch.uint8).view(count, -1))
                begin += num_bytes

    def _pin(self) -> None:
        advice = POPULATE_WRITE if self._is_writable else POPULATE_READ
        pinned = []
        for piece in (piece for pieces in self._pieces for piece in pieces):
            if self._is_closing.is_set():
                break
            advise(piece.data_ptr(), piece.nbytes, advice)
            if not self._device.pin(piece, self._is_writable):
                logger.warning("the driver does not register shared memory: copies are slower")
                break
            pinned.append(piece)
            self.pinned_bytes += piece.nbytes
        self._is_ready.set()
        self._is_closing.wait()
        for piece in pinned:
            self._device.unpin(piece)


def _blocks_per_piece(section: Section) -> int:
    """Return the number of blocks of about PIECE_BYTES in whole pages."""
    quantum = section.quantum
    return max(PIECE_BYTES // max(section.block_bytes, 1) // quantum, 1) * quantum
