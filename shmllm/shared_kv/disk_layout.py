"""The layout of the file on disk that has copies of shared blocks of one kind.

    offset                      content
    0                           header: magic, version, section, size of a block, key of the folder
    COUNTER_OFFSET              number of changes, u64: whoever reads another number scans again
    HEADER_BYTES                groups of SLOTS_PER_GROUP slots; each group has
                                  one page with an entry of ENTRY_BYTES for each slot
                                  the slots, each as large as a block, rounded up to pages

An entry has sequence number, slot, section, length, key and SHA-256 of the data, and at its end
SHA-256 of all that and of the header. SHA-256 was the fastest secure digest that hashlib has: 0.7
GB/s on a busy Xeon core with SHA instructions, where BLAKE2b reached 0.4 GB/s. This module must not
know files.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

from shmllm.shared_kv.layout import KEY_BYTES

MAGIC = b"shmllmkv"
VERSION = 1
PAGE_BYTES = 4096
HEADER_BYTES = PAGE_BYTES
COUNTER_OFFSET = 512
ENTRY_BYTES = 128
NO_ENTRY = bytes(ENTRY_BYTES)
SLOTS_PER_GROUP = PAGE_BYTES // ENTRY_BYTES
WRITER_BYTE, USER_BYTE = 0, 1
"""The bytes that processes lock."""

_HEADER = struct.Struct("<8sIIQ16s")
_ENTRY = struct.Struct(f"<QQIIQ{KEY_BYTES}s32s")


class Record(NamedTuple):
    """The copy of a block.

    slot: where it is.
    sequence: larger than that of every record that was written or used before.
    digest: SHA-256 of its data.
    """

    slot: int
    sequence: int
    digest: bytes


class DiskLayout:
    """
    Args:
        key: the key of the folder of regions, 16 hexadecimal digits.
        section: the section of the blocks.
        block_bytes: their size.

    Attributes:
        header: the bytes of the header.
        block_bytes: as given.
        slot_bytes: the size of a slot.
    """

    def __init__(self, key: str, section: int, block_bytes: int) -> None:
        self.header = _HEADER.pack(MAGIC, VERSION, section, block_bytes, key.encode())
        self.block_bytes, self.slot_bytes = block_bytes, slot_bytes(block_bytes)
        self._section = section

    def difference(self, header: bytes) -> str:
        """What is wrong with another header, for a message."""
        if header[: len(MAGIC)] == MAGIC and len(header) == len(self.header):
            version = _HEADER.unpack(header)[1]
            if version != VERSION:
                return f"it has version {version}, expected {VERSION}"
        return "its header is damaged, or it is another kind of file"

    def num_slots(self, file_bytes: int) -> int:
        """How many slots have their data in a file of this size. Behind the last block there is
        nothing that rounds it up to pages."""
        return slots_in(file_bytes + self.slot_bytes - self.block_bytes, self.block_bytes)

    def group(self, index: int) -> int:
        """The offset of the entries of a group."""
        return HEADER_BYTES + index * (PAGE_BYTES + SLOTS_PER_GROUP * self.slot_bytes)

    def data(self, slot: int) -> int:
        """The offset of the data in a slot."""
        group, index = divmod(slot, SLOTS_PER_GROUP)
        return self.group(group) + PAGE_BYTES + index * self.slot_bytes

    def entry(self, slot: int) -> int:
        """The offset of the entry of a slot."""
        group, index = divmod(slot, SLOTS_PER_GROUP)
        return self.group(group) + index * ENTRY_BYTES

    def pack(self, key: bytes, record: Record) -> bytes:
        """The entry of a record."""
        slot, sequence, digest = record
        packed = _ENTRY.pack(sequence, slot, self._section, 0, self.block_bytes, key, digest)
        return packed + self._check(packed)

    def parse(self, slot: int, entry: bytes) -> tuple[bytes, Record] | None:
        """The key and the record in the entry of a slot; None if it is none."""
        packed, check = entry[: _ENTRY.size], entry[_ENTRY.size :]
        if entry == NO_ENTRY or self._check(packed) != check:
            return None
        sequence, own_slot, section, _, length, key, digest = _ENTRY.unpack(packed)
        if (own_slot, section, length) != (slot, self._section, self.block_bytes):
            return None
        return key, Record(slot, sequence, digest)

    def _check(self, packed: bytes) -> bytes:
        return hashlib.sha256(self.header + packed).digest()


def slot_bytes(block_bytes: int) -> int:
    """The size of a slot for blocks of a size."""
    return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


def slots_in(num_bytes: int, block_bytes: int) -> int:
    """How many slots fit into a file."""
    size = slot_bytes(block_bytes)
    group_bytes = PAGE_BYTES + SLOTS_PER_GROUP * size
    groups, rest = divmod(max(num_bytes - HEADER_BYTES, 0), group_bytes)
    return groups * SLOTS_PER_GROUP + max(rest - PAGE_BYTES, 0) // size
