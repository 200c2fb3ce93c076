"""The layout of a region: the file in which an engine shares full KV blocks.

    offset                          content                                  who writes
    0                               header: magic, version, sizes            the owner, at creation
    PINS_OF_OFFSET                  for each place: are pins kept for it     the owner, as a reader
    DESCRIPTION_OFFSET              JSON: what the blocks were computed by   the owner, at creation
    TABLES_OFFSET                   for each section:
                                      generation of each block, u64          the owner
                                      key of each block, 32 bytes            the owner
                                      index: buckets of block numbers, u32   the owner
                                    for each place and section:
                                      pins: one byte for each block there    the owner, as a reader
    data_offset                     for each section and buffer:
                                      its part of each block                 the owner

A section has the blocks of one kind: section 0 has keys and values, section 1 recurrent states. The
part of a block in a buffer is what a layer, or several, keep in it; a buffer's parts follow each
other, and each buffer begins on a page. If ranks of a group divide the layers, the buffers of all
ranks are those of a block, rank by rank, and each rank reads and writes its own.

Every byte has one writing process: the owner. A reader's pins lie in the reader's own region, at
the place of the region whose blocks it reads. This module must not know files and processes.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from itertools import accumulate
from math import gcd

from shmllm.errors import ProtocolMismatchError

MAGIC = 0x6B76_6C6C_6D73_6873
VERSION = 1
WORD_BYTES = 8
KEY_BYTES = 32
NUM_PLACES = 32
"""The most regions of one folder."""
MOST_BLOCKS = 2**17
"""The most blocks of a section."""
NUM_SECTIONS = 2
WAYS = 8
"""The blocks of a bucket of the index."""
PINS_OF_OFFSET = 256
DESCRIPTION_OFFSET = 1024
DESCRIPTION_BYTES = 3072
TABLES_OFFSET = 4096
_HEADER_WORDS = 3
_WORDS_PER_SECTION = 3


@dataclass(frozen=True, slots=True)
class Section:
    """The blocks of one kind.

    Attributes:
        num_blocks: their number, a multiple of `quantum`.
        num_buffers: the number of buffers that have a part of each block.
        part_bytes: the size of such a part.
    """

    num_blocks: int
    num_buffers: int
    part_bytes: int

    @property
    def quantum(self) -> int:
        """The smallest number of blocks whose parts fill whole pages."""
        return mmap.PAGESIZE // gcd(mmap.PAGESIZE, self.part_bytes) if self.part_bytes else 1

    @property
    def buffer_bytes(self) -> int:
        """The size of a buffer."""
        return self.num_blocks * self.part_bytes

    @property
    def block_bytes(self) -> int:
        """The size of a block in all buffers."""
        return self.num_buffers * self.part_bytes

    @property
    def num_buckets(self) -> int:
        """The number of buckets of the index: at least two for each block. A block whose bucket is
        full cannot be found, nor what follows it in its prefix; with so many that happens to one
        block in 10^9."""
        return 1 << max(2 * self.num_blocks - 1, 0).bit_length()


@dataclass(frozen=True, slots=True)
class Tables:
    """The offsets of a section's tables in the file."""

    generations: int
    keys: int
    index: int


@dataclass(frozen=True, slots=True)
class RegionLayout:
    """The layout of a region with these sections."""

    sections: tuple[Section, ...]

    @property
    def shape(self) -> tuple[tuple[int, int], ...]:
        """What a block of each section is: its number of buffers, and the size of its parts."""
        return tuple((each.num_buffers, each.part_bytes) for each in self.sections)

    @property
    def tables(self) -> tuple[Tables, ...]:
        """The tables of each section."""
        found, begin = [], TABLES_OFFSET
        for section in self.sections:
            keys = begin + section.num_blocks * WORD_BYTES
            index = keys + section.num_blocks * KEY_BYTES
            found.append(Tables(begin, keys, index))
            begin = _padded(index + section.num_buckets * WAYS * 4)
        return tuple(found)

    @property
    def pins_offset(self) -> int:
        """The offset of all pins, which is that of the end of the tables."""
        last, section = self.tables[-1], self.sections[-1]
        return _padded(last.index + section.num_buckets * WAYS * 4)

    def pins(self, place: int, section: int) -> int:
        """Return the offset of the pins for a section of the region at a place."""
        return self.pins_offset + (place * NUM_SECTIONS + section) * MOST_BLOCKS

    @property
    def data_offset(self) -> int:
        """The offset of the data in the file that has the tables."""
        return self.pins(NUM_PLACES, 0)

    @property
    def data_bytes(self) -> int:
        """The size of the data."""
        return sum(each.num_buffers * each.buffer_bytes for each in self.sections)

    @property
    def buffer_offsets(self) -> tuple[tuple[int, ...], ...]:
        """The offset of each buffer of each section, from the beginning of the data."""
        sizes = [each.num_buffers * each.buffer_bytes for each in self.sections]
        begins = [0, *accumulate(sizes)]
        return tuple(
            tuple(begin + buffer * each.buffer_bytes for buffer in range(each.num_buffers))
            for begin, each in zip(begins, self.sections, strict=False)
        )

    def header(self) -> list[int]:
        """The words of the header."""
        words = [MAGIC, VERSION, len(self.sections)]
        for section in self.sections:
            words += [section.num_blocks, section.num_buffers, section.part_bytes]
        return words

    @classmethod
    def from_header(cls, words: memoryview, path: str) -> RegionLayout:
        """Read the header of a file.

        Args:
            words: the first words of the file.
            path: its path, for the error.

        Raises:
            ProtocolMismatchError: it is no region of this version, or the header is damaged.
        """
        magic, version, count = words[:_HEADER_WORDS]
        if magic != MAGIC or version != VERSION:
            raise ProtocolMismatchError(
                f"{path} is no region of this version: magic {magic:#x}, version {version}, "
                f"expected {MAGIC:#x}, {VERSION}"
            )
        if count != NUM_SECTIONS:
            raise ProtocolMismatchError(f"{path} is damaged: it has {count} sections")
        numbers = words[_HEADER_WORDS : _HEADER_WORDS + _WORDS_PER_SECTION * count].tolist()
        sections = tuple(Section(*numbers[i : i + 3]) for i in range(0, len(numbers), 3))
        for section in sections:
            if section.num_blocks > MOST_BLOCKS or section.num_blocks % section.quantum:
                raise ProtocolMismatchError(f"{path} is damaged: a section has {section}")
        return cls(sections)


def _padded(count: int) -> int:
    return -(-count // mmap.PAGESIZE) * mmap.PAGESIZE


def divide(
    num_bytes: int, blocks: tuple[int, int], states: tuple[int, int], blocks_per_state: float
) -> tuple[Section, Section]:
    """Divide memory between blocks of keys and values and blocks of states.

    Args:
        num_bytes: the memory.
        blocks: the number of buffers of a block, and the size of its part in each; (0, 0): no
            layer has keys and values.
        states: the same for states.
        blocks_per_state: how many blocks of keys and values a request fills for each state.
    """
    block_bytes, state_bytes = blocks[0] * blocks[1], states[0] * states[1]
    if not block_bytes:
        return Section(0, *blocks), _rounded(num_bytes // state_bytes, states)
    num_states = 0
    if state_bytes:
        num_states = int(num_bytes // (blocks_per_state * block_bytes + state_bytes))
    rounded = _rounded(num_states, states)
    left = num_bytes - rounded.num_blocks * state_bytes
    return _rounded(max(left, 0) // block_bytes, blocks), rounded


def _rounded(count: int, parts: tuple[int, int]) -> Section:
    quantum = Section(0, *parts).quantum
    return Section(min(count, MOST_BLOCKS) // quantum * quantum, *parts)
