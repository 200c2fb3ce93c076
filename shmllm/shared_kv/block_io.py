"""Reads and writes whole blocks in the file of a region. Such a copy has the parts of the block one
behind the other, in the order of the buffers."""

from __future__ import annotations

import os

from shmllm.errors import ProtocolMismatchError
from shmllm.ipc.words import fence
from shmllm.shared_kv.layout import RegionLayout
from shmllm.shared_kv.region import Region


def write_block(fd: int, layout: RegionLayout, section: int, block: int, data: memoryview) -> None:
    """Write a block of the own region that nobody reads.

    Raises:
        OSError: shared memory is full.
    """
    size = layout.sections[section].part_bytes
    at = layout.data_offset + block * size
    for index, begin in enumerate(layout.buffer_offsets[section]):
        os.pwrite(fd, data[index * size : (index + 1) * size], at + begin)


def read_block(region: Region, section: int, key: bytes, target: memoryview) -> bool:
    """Copy the block of a key.

    Args:
        region: the region. Its owner may write meanwhile.
        section: the section of the block.
        key: its key.
        target: for the copy.

    Returns:
        False: there is none, or it was reused meanwhile, and the target has anything.
    """
    try:
        block = region.find(section, key)
    except ProtocolMismatchError:
        return False
    if block is None:
        return False
    generation = region.generation(section, block)
    if generation % 2 or not region.has_key(section, block, key):
        return False
    layout = region.layout
    size = layout.sections[section].part_bytes
    at = layout.data_offset + block * size
    for index, begin in enumerate(layout.buffer_offsets[section]):
        part = target[index * size : (index + 1) * size]
        if os.preadv(region.fd, [part], at + begin) != size:
            return False
    fence()  # SYNC POINT: the owner raises the generation before it overwrites the block
    return region.generation(section, block) == generation and not region.is_lost
