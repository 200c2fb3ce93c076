"""The layout of regions: parts do not overlap, and a damaged header is an error."""

from __future__ import annotations

import mmap
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmllm.errors import ProtocolMismatchError
from shmllm.shared_kv import layout
from shmllm.shared_kv.layout import MOST_BLOCKS, NUM_PLACES, RegionLayout, Section, divide

PAGE = mmap.PAGESIZE
LAYOUT = RegionLayout((Section(24, 3, 512), Section(8, 2, 1536)))


def header(**changes: int) -> memoryview:
    words = LAYOUT.header()
    for name, value in changes.items():
        words[int(name.removeprefix("word"))] = value
    return memoryview(b"".join(word.to_bytes(8, "little") for word in words)).cast("Q")


def intervals(of: RegionLayout) -> list[tuple[int, int]]:
    """Everything that a region has, as [begin, end)."""
    found = [
        (0, 8 * len(of.header())),
        (layout.PINS_OF_OFFSET, layout.PINS_OF_OFFSET + 8 * NUM_PLACES),
        (layout.DESCRIPTION_OFFSET, layout.DESCRIPTION_OFFSET + layout.DESCRIPTION_BYTES),
    ]
    for tables, section in zip(of.tables, of.sections, strict=True):
        found += [
            (tables.generations, tables.generations + 8 * section.num_blocks),
            (tables.keys, tables.keys + 32 * section.num_blocks),
            (tables.index, tables.index + 4 * layout.WAYS * section.num_buckets),
        ]
    for place in range(NUM_PLACES):
        for section in range(2):
            begin = of.pins(place, section)
            found.append((begin, begin + MOST_BLOCKS))
    for offsets, section in zip(of.buffer_offsets, of.sections, strict=True):
        for offset in offsets:
            begin = of.data_offset + offset
            found.append((begin, begin + section.buffer_bytes))
    return [each for each in found if each[0] < each[1]]


sections = st.builds(
    lambda quanta, buffers, part: Section(quanta * Section(0, 1, part).quantum, buffers, part),
    st.integers(0, 40),
    st.integers(0, 4),
    st.integers(1, 64).map(lambda n: 64 * n),
)


@given(sections, sections)
def test_parts_do_not_overlap_and_buffers_begin_on_pages(blocks: Section, states: Section) -> None:
    of = RegionLayout((blocks, states))
    found = sorted(intervals(of))
    assert all(end <= begin for (_, end), (begin, _) in pairwise(found))
    assert found[-1][1] <= of.data_offset + of.data_bytes
    assert of.pins_offset % PAGE == of.data_offset % PAGE == 0
    assert all(offset % PAGE == 0 for offsets in of.buffer_offsets for offset in offsets)
    assert all(tables.generations % 8 == tables.index % 4 == 0 for tables in of.tables)


@given(sections, sections)
def test_the_header_gives_the_layout(blocks: Section, states: Section) -> None:
    of = RegionLayout((blocks, states))
    words = memoryview(b"".join(word.to_bytes(8, "little") for word in of.header())).cast("Q")
    assert RegionLayout.from_header(words, "a path") == of


@pytest.mark.parametrize("num_blocks", [1, 3, 8, 100, MOST_BLOCKS])
def test_the_index_has_room_for_twice_the_blocks(num_blocks: int) -> None:
    buckets = Section(num_blocks, 1, 64).num_buckets
    assert buckets * layout.WAYS >= 2 * num_blocks
    assert buckets & (buckets - 1) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"word0": 1}, "magic 0x1"),
        ({"word1": 99}, "version 99"),
        ({"word2": 3}, "it has 3 sections"),
        ({"word3": MOST_BLOCKS + 8}, "damaged"),
        ({"word3": 25}, "damaged"),
        ({"word5": 511}, "damaged"),
    ],
)
def test_a_damaged_header_is_an_error(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ProtocolMismatchError, match=words):
        RegionLayout.from_header(header(**changes), "a path")


def test_a_quantum_fills_whole_pages() -> None:
    assert [Section(0, 1, part).quantum for part in (0, 64, 512, 1536, PAGE, 3 * PAGE)] == [
        *(1, PAGE // 64, PAGE // 512, 8, 1, 1)
    ]


@given(
    st.integers(0, 2**32),
    st.tuples(st.integers(1, 30), st.integers(1, 99).map(lambda n: 64 * n)),
    st.tuples(st.integers(0, 30), st.integers(1, 99).map(lambda n: 64 * n)),
    st.floats(0, 50),
)
def test_a_division_uses_no_more_than_there_is(
    num_bytes: int, blocks: tuple[int, int], states: tuple[int, int], ratio: float
) -> None:
    states = states if states[0] else (0, 0)
    found = divide(num_bytes, blocks, states, ratio)
    assert RegionLayout(found).data_bytes <= num_bytes
    assert all(each.num_blocks % each.quantum == 0 for each in found)
    assert all(each.num_blocks <= MOST_BLOCKS for each in found)


def test_a_division_gives_each_state_its_blocks() -> None:
    blocks, states = divide(2**30, (4, PAGE), (2, PAGE), 8.0)
    assert blocks.num_blocks == pytest.approx(8 * states.num_blocks, rel=0.01)
    assert divide(2**20, (4, PAGE), (0, 0), 0.0) == (Section(64, 4, PAGE), Section(0, 0, 0))
    assert divide(2**20, (0, 0), (2, PAGE), 0.0) == (Section(0, 0, 0), Section(128, 2, PAGE))
