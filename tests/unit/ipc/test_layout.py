"""The diagrams of the layout agree with its constants, and no fields overlap."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shmllm.config.speculative import MOST_DRAFTED
from shmllm.ipc import layout
from shmllm.ipc.states import SegmentKind
from shmllm.ipc.stats import PHASES, Histogram, Mark, Stat, StepField

_ROW = re.compile(r"\|\s*\+?(0x[0-9a-f]+)\s*\|\s*([A-Z][A-Z_]*[A-Z])\s*\|\s*(\w+(?: k)?|)\s*\|")
ROWS = [(name, int(offset, 16), writer) for offset, name, writer in _ROW.findall(layout.__doc__)]

WORDS = {
    SegmentKind.CONTROL: [
        "CONTROL_STATE",
        "CONTROL_HEARTBEAT",
        "CONTROL_PARKED",
        "CONTROL_STEP_COUNT",
    ],
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
        "client k",
        "operator",
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


def test_pages_that_others_may_write_hold_nothing_of_the_engine() -> None:
    in_control = {
        (name, offset, writer)
        for name, offset, writer in ROWS
        if name.startswith("CONTROL_") and not name.endswith("_END")
    }
    for page, theirs in (
        (layout.CONTROL_HELLO_OFFSET, {"client k", "both"}),
        (layout.CONTROL_STOP_OFFSET, {"operator"}),
    ):
        assert page % layout.PAGE_BYTES == 0
        on_page = {w for _, o, w in in_control if page <= o < page + layout.PAGE_BYTES}
        assert on_page == theirs
        assert not any(w in theirs for _, o, w in in_control if o // 4096 != page // 4096)


def test_statistics_words_are_numbered_without_gaps() -> None:
    assert list(Stat) == list(range(len(Stat)))
    assert list(Mark) == list(range(len(Mark)))
    end = layout.CONTROL_MARKS_OFFSET + len(Mark) * layout.WORD_BYTES
    assert end <= layout.CONTROL_HEARTBEAT_OFFSET
    assert list(StepField) == list(range(len(StepField)))


@pytest.mark.parametrize("phase", PHASES)
def test_each_phase_has_a_statistics_word_and_a_field(phase: str) -> None:
    assert f"{phase.upper()}_NS" in Stat.__members__
    assert f"{phase.upper()}_NS" in StepField.__members__


def test_fields_do_not_overlap() -> None:
    assert layout.CONTROL_STATS_OFFSET + 8 * layout.NUM_STAT_WORDS <= (
        layout.CONTROL_ACCEPTED_AT_OFFSET
    )
    assert layout.CONTROL_ACCEPTED_AT_OFFSET + 8 * layout.NUM_DRAFT_PLACES <= (
        layout.CONTROL_LAST_WORDS_SIZE_OFFSET
    )
    assert layout.NUM_DRAFT_PLACES == MOST_DRAFTED
    assert max(Stat) < layout.NUM_STAT_WORDS
    assert layout.CONTROL_LAST_WORDS_OFFSET + layout.LAST_WORDS_BYTES <= layout.CONTROL_END_OFFSET
    table = layout.NUM_CLIENTS * layout.WORD_BYTES
    assert (
        layout.CONTROL_LAST_WORDS_OFFSET + layout.LAST_WORDS_BYTES <= layout.CONTROL_DEVICE_OFFSET
    )
    assert layout.CONTROL_DEVICE_OFFSET + layout.NAME_BYTES <= layout.CONTROL_MODEL_OFFSET
    assert layout.CONTROL_MODEL_OFFSET + layout.NAME_BYTES <= layout.CONTROL_ANSWER_OFFSET
    assert layout.CONTROL_ANSWER_OFFSET + table <= layout.CONTROL_PRECISION_OFFSET
    assert layout.CONTROL_PRECISION_OFFSET + layout.NAME_BYTES <= layout.CONTROL_SPECULATION_OFFSET
    assert layout.CONTROL_SPECULATION_OFFSET + layout.NAME_BYTES <= layout.CONTROL_HELLO_OFFSET
    assert layout.CONTROL_HELLO_OFFSET + table <= layout.CONTROL_DOORBELL_OFFSET
    assert (
        layout.CONTROL_DOORBELL_OFFSET + layout.DOORBELL_BYTES <= layout.CONTROL_HISTOGRAMS_OFFSET
    )
    histogram = layout.HISTOGRAM_WORDS * layout.WORD_BYTES
    assert layout.CONTROL_HISTOGRAMS_OFFSET + layout.NUM_HISTOGRAMS * histogram == (
        layout.CONTROL_STEP_COUNT_OFFSET
    )
    records = layout.NUM_STEP_RECORDS * layout.STEP_RECORD_BYTES
    assert layout.CONTROL_STEP_RECORDS_OFFSET + records == layout.CONTROL_ERRORS_OFFSET
    errors = layout.NUM_ERRORS * layout.ERROR_ENTRY_BYTES
    assert layout.CONTROL_ERRORS_OFFSET + errors == layout.CONTROL_END_OFFSET
    assert layout.ERROR_TEXT_OFFSET + layout.ERROR_TEXT_BYTES == layout.ERROR_ENTRY_BYTES
    assert len(StepField) * layout.WORD_BYTES <= layout.STEP_RECORD_BYTES
    assert max(Histogram) < layout.NUM_HISTOGRAMS
    slots = layout.NUM_SLOTS * layout.SLOT_ENTRY_BYTES
    assert layout.REQUEST_SLOT_TABLE_OFFSET + slots <= layout.OUTPUT_SLOT_TABLE_OFFSET
    assert layout.OUTPUT_SLOT_TABLE_OFFSET + slots <= layout.REQUEST_RING_OFFSET
    assert layout.REQUEST_RING_OFFSET + layout.RING_BYTES == layout.OUTPUT_RING_OFFSET
    assert layout.OUTPUT_RING_OFFSET + layout.RING_BYTES == layout.REQUEST_SMALL_SLOTS_OFFSET


def test_slots_lie_side_by_side_to_the_end_of_the_segment() -> None:
    begin = layout.REQUEST_SMALL_SLOTS_OFFSET
    both = zip(layout.REQUEST_SLOT_LAYOUT.classes, layout.OUTPUT_SLOT_LAYOUT.classes, strict=True)
    for each in (slot_class for pair in both for slot_class in pair):
        assert each.data_offset == begin
        assert begin % layout.PAGE_BYTES == 0
        begin += each.num_slots * each.slot_bytes
    assert begin == layout.CLIENT_END_OFFSET


def test_slot_classes_are_sorted_and_keep_a_bounded_number_of_bytes() -> None:
    for slots in (layout.REQUEST_SLOT_LAYOUT, layout.OUTPUT_SLOT_LAYOUT):
        sizes = [each.slot_bytes for each in slots.classes]
        assert sizes == sorted(sizes)
        assert sum(each.num_slots for each in slots.classes) == layout.NUM_SLOTS
        assert all(size % layout.SLOT_PAGES_STEP_BYTES == 0 for size in sizes)
        kept = sum(each.num_slots * each.kept_bytes for each in slots.classes)
        assert kept <= 100 * 1024 * 1024
        assert all(each.kept_bytes % layout.PAGE_BYTES == 0 for each in slots.classes)


def test_the_documented_slots_are_those_of_the_layout() -> None:
    text = (Path(__file__).parents[3] / "docs" / "ipc.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| (\d+) \w+ \| (\d+) (KiB|MiB|GiB) \| (?:all|at most (\d+) MiB)", text)
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    documented = []
    for count, number, unit, kept in rows:
        slot_bytes = int(number) * units[unit]
        kept_bytes = int(kept) * units["MiB"] if kept else slot_bytes
        documented.append((int(count), slot_bytes, kept_bytes))
    classes = layout.OUTPUT_SLOT_LAYOUT.classes
    assert documented == [(each.num_slots, each.slot_bytes, each.kept_bytes) for each in classes]


def test_segments_keep_to_their_memory_limits() -> None:
    mib = 1024 * 1024
    assert layout.ALLOCATED_BYTES[SegmentKind.CONTROL] <= mib
    assert layout.ALLOCATED_BYTES[SegmentKind.CLIENT] <= 1.5 * mib
    assert 32 * layout.ALLOCATED_BYTES[SegmentKind.CLIENT] + mib <= 64 * mib


def test_the_record_header_has_the_documented_size() -> None:
    assert layout.RECORD_HEADER.size == layout.RECORD_HEADER_BYTES == layout.RECORD_ALIGNMENT
