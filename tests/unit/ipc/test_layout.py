"""The diagrams say what the constants say, and the fields do not overlap."""

from __future__ import annotations

import re

import pytest

from shmllm.ipc import layout
from shmllm.ipc.layout import SegmentKind, Stat

_ROW = re.compile(r"\|\s*\+?(0x[0-9a-f]+)\s*\|\s*([A-Z][A-Z_]*[A-Z])\s*\|\s*(\w*)\s*\|")
ROWS = [(name, int(offset, 16), writer) for offset, name, writer in _ROW.findall(layout.__doc__)]

WORDS = {
    SegmentKind.CONTROL: ["CONTROL_STATE", "CONTROL_HEARTBEAT", "CONTROL_PARKED"],
    SegmentKind.CLIENT: [
        "CLIENT_STATE",
        "CLIENT_PARKED",
        "CLIENT_DOORBELL",
        "REQUEST_PUBLISHED",
        "REQUEST_CONSUMED",
        "OUTPUT_PUBLISHED",
        "OUTPUT_CONSUMED",
    ],
}


def test_the_diagrams_are_found() -> None:
    assert len(ROWS) > 30


@pytest.mark.parametrize(("name", "offset"), sorted({(name, offset) for name, offset, _ in ROWS}))
def test_the_diagram_gives_the_constant(name: str, offset: int) -> None:
    assert getattr(layout, f"{name}_OFFSET") == offset


def test_every_offset_is_in_a_diagram() -> None:
    constants = {name for name in vars(layout) if name.endswith("_OFFSET")}
    assert constants == {f"{name}_OFFSET" for name, _, _ in ROWS}


def test_every_field_names_its_writer() -> None:
    writers = {name: writer for name, _, writer in ROWS if not name.endswith("_END")}
    assert set(writers.values()) <= {
        "creator",
        "engine",
        "client",
        "libc",
        "both",
        "writer",
        "reader",
    }
    assert writers["REQUEST_PUBLISHED"] == "client"
    assert writers["REQUEST_CONSUMED"] == "engine"
    assert writers["OUTPUT_PUBLISHED"] == "engine"
    assert writers["OUTPUT_CONSUMED"] == "client"


@pytest.mark.parametrize("kind", list(SegmentKind))
def test_hot_words_have_lines_of_their_own(kind: SegmentKind) -> None:
    lines = [getattr(layout, f"{name}_OFFSET") // layout.LINE_BYTES for name in WORDS[kind]]
    assert len(set(lines)) == len(lines)


def test_fields_do_not_overlap() -> None:
    assert layout.CONTROL_STATS_OFFSET + 8 * layout.NUM_STAT_WORDS <= (
        layout.CONTROL_LAST_WORDS_SIZE_OFFSET
    )
    assert max(Stat) < layout.NUM_STAT_WORDS
    assert layout.CONTROL_LAST_WORDS_OFFSET + layout.LAST_WORDS_BYTES <= layout.CONTROL_END_OFFSET
    slots = layout.NUM_SLOTS * layout.SLOT_ENTRY_BYTES
    assert layout.REQUEST_SLOT_TABLE_OFFSET + slots <= layout.OUTPUT_SLOT_TABLE_OFFSET
    assert layout.OUTPUT_SLOT_TABLE_OFFSET + slots <= layout.REQUEST_RING_OFFSET
    assert layout.REQUEST_RING_OFFSET + layout.RING_BYTES == layout.OUTPUT_RING_OFFSET
    assert layout.OUTPUT_RING_OFFSET + layout.RING_BYTES == layout.REQUEST_SLOT_DATA_OFFSET
    data = layout.NUM_SLOTS * layout.SLOT_BYTES
    assert layout.REQUEST_SLOT_DATA_OFFSET + data == layout.OUTPUT_SLOT_DATA_OFFSET
    assert layout.OUTPUT_SLOT_DATA_OFFSET + data == layout.CLIENT_END_OFFSET


def test_segments_keep_to_their_budget() -> None:
    mib = 1024 * 1024
    assert layout.ALLOCATED_BYTES[SegmentKind.CONTROL] <= mib
    assert layout.ALLOCATED_BYTES[SegmentKind.CLIENT] <= 1.5 * mib
    assert 32 * layout.ALLOCATED_BYTES[SegmentKind.CLIENT] + mib <= 64 * mib


def test_record_header_has_the_size_that_is_written_down() -> None:
    assert layout.RECORD_HEADER.size == layout.RECORD_HEADER_BYTES == layout.RECORD_ALIGNMENT
