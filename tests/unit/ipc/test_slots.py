from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shmllm.errors import (
    MessageTooLargeError,
    NoSpaceError,
    ProtocolMismatchError,
    SegmentError,
)
from shmllm.ipc import layout
from shmllm.ipc.layout import SLOT_ENTRY_BYTES, SlotClass, SlotLayout
from shmllm.ipc.segment import Segment
from shmllm.ipc.slots import Slot, SlotReader, SlotRef, SlotWriter
from shmllm.ipc.states import SegmentKind

PAGE = 4096
SMALL, MEDIUM, LARGE, KEPT = PAGE, 4 * PAGE, 64 * PAGE, 2 * PAGE
DATA = PAGE
LAYOUT = SlotLayout(
    table_offset=0,
    classes=(
        SlotClass(DATA, 3, SMALL, SMALL, True),
        SlotClass(DATA + 3 * SMALL, 2, MEDIUM, MEDIUM, True),
        SlotClass(DATA + 3 * SMALL + 2 * MEDIUM, 1, LARGE, KEPT, False),
    ),
)
NUM_SLOTS = 6
FIRST_MEDIUM, LARGE_SLOT = 3, 5
END = DATA + 3 * SMALL + 2 * MEDIUM + LARGE


class Pages:
    """A fake file system that tracks which pages are allocated."""

    def __init__(self, capacity: int = END) -> None:
        self.capacity = capacity
        self.present: set[int] = set()
        self.log: list[tuple[str, int, int]] = []

    def allocate(self, offset: int, nbytes: int) -> None:
        self.log.append(("allocate", offset, nbytes))
        wanted = set(range(offset // PAGE, (offset + nbytes) // PAGE))
        if len(self.present | wanted) * PAGE > self.capacity:
            raise NoSpaceError(f"{nbytes} bytes needed")
        self.present |= wanted

    def discard(self, offset: int, nbytes: int) -> None:
        self.log.append(("discard", offset, nbytes))
        gone = set(range(offset // PAGE, (offset + nbytes) // PAGE))
        assert gone <= self.present
        self.present -= gone


class Slots:
    """Both ends of slots in ordinary memory."""

    def __init__(self, capacity: int = END) -> None:
        self.memory = bytearray(END)
        self.pages = Pages(capacity)
        view = memoryview(self.memory)
        self.writer = SlotWriter(view, LAYOUT, self.pages.allocate, self.pages.discard)
        self.reader = SlotReader(view, LAYOUT)

    def send(self, payload: bytes) -> SlotRef:
        slot = self.writer.claim(len(payload))
        assert slot is not None
        slot.buffer[:] = payload
        return slot.publish()


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmllm.ipc.slot_pages.SLOT_PAGES_STEP_BYTES", PAGE)


def test_an_array_arrives_in_place() -> None:
    slots = Slots()
    array = np.arange(100, dtype=np.float32).reshape(10, 10)
    ref = slots.send(array.tobytes())
    assert ref == SlotRef(0, 0, array.nbytes)
    with slots.reader.view(ref) as view:
        assert view.readonly
        assert np.array_equal(np.frombuffer(view, dtype=np.float32).reshape(10, 10), array)
    slots.reader.release(ref)
    assert slots.writer.num_free == NUM_SLOTS
    slots.writer.check_integrity()


def test_a_reference_may_name_a_part_of_a_slot() -> None:
    slots = Slots()
    ref = slots.send(b"0123456789")
    assert bytes(slots.reader.view(SlotRef(ref.slot, 4, 3))) == b"456"


@pytest.mark.parametrize(
    ("nbytes", "slot"),
    [
        (0, 0),
        (SMALL, 0),
        (SMALL + 1, FIRST_MEDIUM),
        (MEDIUM, FIRST_MEDIUM),
        (MEDIUM + 1, LARGE_SLOT),
        (LARGE, LARGE_SLOT),
    ],
)
def test_a_payload_gets_the_smallest_slot_that_holds_it(nbytes: int, slot: int) -> None:
    assert Slots().send(bytes(nbytes)).slot == slot


def test_small_payloads_may_use_medium_slots_but_no_large_ones() -> None:
    slots = Slots()
    refs = [slots.send(bytes([n])) for n in range(5)]
    assert [ref.slot for ref in refs] == [0, 1, 2, 3, 4]
    assert slots.writer.claim(1) is None
    assert slots.writer.claim(MEDIUM) is None
    assert slots.writer.num_free == 1
    assert slots.writer.num_slots_for(1) == 5
    assert slots.writer.num_slots_for(MEDIUM) == 2
    assert slots.writer.num_slots_for(LARGE) == 1
    slots.reader.release(refs[1])
    slot = slots.writer.claim(1)
    assert slot is not None
    assert slot.index == 1
    assert bytes(slots.reader.view(refs[2])) == b"\2"
    assert slots.writer.claim(LARGE) is not None


def test_a_claimed_slot_is_free_again_after_abort_only() -> None:
    slots = Slots()
    claimed = [slots.writer.claim(1) for _ in range(5)]
    assert slots.writer.claim(1) is None
    assert claimed[0] is not None
    claimed[0].abort()
    assert slots.writer.num_free == 2
    with pytest.raises(ProtocolMismatchError, match="not published"):
        slots.reader.view(SlotRef(0, 0, 1))


@pytest.mark.parametrize("first", ["publish", "abort"])
@pytest.mark.parametrize("second", ["publish", "abort"])
def test_a_claim_ends_once(first: str, second: str) -> None:
    slot = Slots().writer.claim(1)
    getattr(slot, first)()
    with pytest.raises(RuntimeError, match="already"):
        getattr(slot, second)()


def test_pages_are_allocated_when_a_payload_needs_them_and_reused() -> None:
    slots = Slots()
    assert slots.pages.log == []
    for nbytes in (PAGE + 1, 3 * PAGE, 3 * PAGE, 2 * PAGE):
        slots.reader.release(slots.send(bytes(nbytes)))
    begin = DATA + 3 * SMALL
    assert slots.pages.log == [
        ("allocate", begin, 2 * PAGE),
        ("allocate", begin + 2 * PAGE, PAGE),
    ]
    assert slots.writer.allocated_bytes == 3 * PAGE


def test_a_slot_that_has_its_pages_is_preferred() -> None:
    slots = Slots()
    first, second = slots.send(bytes(2 * PAGE)), slots.send(bytes(4 * PAGE))
    slots.reader.release(first)
    slots.reader.release(second)
    assert slots.send(bytes(2 * PAGE)).slot == first.slot
    slots = Slots()
    first, second = slots.send(bytes(2 * PAGE)), slots.send(bytes(4 * PAGE))
    slots.reader.release(first)
    slots.reader.release(second)
    assert slots.send(bytes(4 * PAGE)).slot == second.slot


def test_excess_pages_of_a_large_slot_are_freed_after_its_release() -> None:
    slots = Slots()
    ref = slots.send(bytes(40 * PAGE))
    assert slots.writer.has_excess
    assert slots.writer.reclaim() == 0
    slots.reader.release(ref)
    assert slots.writer.reclaim() == 38 * PAGE
    assert not slots.writer.has_excess
    assert slots.writer.allocated_bytes == KEPT == len(slots.pages.present) * PAGE
    ref = slots.send(bytes(5 * PAGE))
    assert slots.pages.log[-1] == ("allocate", DATA + 3 * SMALL + 2 * MEDIUM + KEPT, 3 * PAGE)
    slots.reader.release(ref)


def test_a_claim_frees_excess_pages_except_in_its_own_slot() -> None:
    slots = Slots()
    slots.reader.release(slots.send(bytes(40 * PAGE)))
    slots.reader.release(slots.send(bytes(40 * PAGE)))
    assert len(slots.pages.log) == 1
    slots.send(b"x")
    assert slots.writer.allocated_bytes == KEPT + PAGE


def test_excess_pages_of_an_aborted_claim_are_freed() -> None:
    slots = Slots()
    slot = slots.writer.claim(40 * PAGE)
    assert slot is not None
    slot.abort()
    assert slots.writer.reclaim() == 38 * PAGE


def test_no_space_claims_nothing_and_the_slots_stay_usable() -> None:
    slots = Slots(capacity=4 * PAGE)
    with pytest.raises(NoSpaceError):
        slots.writer.claim(5 * PAGE)
    assert slots.writer.num_free == NUM_SLOTS
    assert slots.writer.allocated_bytes == 0
    ref = slots.send(bytes(4 * PAGE))
    with pytest.raises(NoSpaceError):
        slots.writer.claim(1)
    slots.reader.release(ref)
    assert slots.send(bytes(3 * PAGE)).slot == ref.slot


def test_if_memory_is_full_a_claim_frees_the_pages_of_free_slots() -> None:
    slots = Slots(capacity=6 * PAGE)
    in_use = slots.send(bytes(PAGE))
    slots.reader.release(slots.send(bytes(4 * PAGE)))
    ref = slots.send(bytes(5 * PAGE))
    assert ref.slot == LARGE_SLOT
    assert slots.pages.log[-2:] == [
        ("discard", DATA + 3 * SMALL, 4 * PAGE),
        ("allocate", DATA + 3 * SMALL + 2 * MEDIUM, 5 * PAGE),
    ]
    assert bytes(slots.reader.view(in_use)) == bytes(PAGE)
    assert slots.writer.allocated_bytes == 6 * PAGE


@pytest.mark.parametrize("nbytes", [LARGE + 1, -1])
def test_the_error_for_a_payload_that_is_too_large_names_both_sizes(nbytes: int) -> None:
    with pytest.raises(MessageTooLargeError, match=rf"{nbytes} bytes exceeds .* {LARGE} bytes"):
        Slots().writer.claim(nbytes)


@pytest.mark.parametrize(
    "ref",
    [
        SlotRef(-1, 0, 1),
        SlotRef(NUM_SLOTS, 0, 1),
        SlotRef(0, -1, 1),
        SlotRef(0, 0, -1),
        SlotRef(0, 0, 11),
        SlotRef(0, 1, 10),
        SlotRef(0, 11, 0),
        SlotRef(0, 2**63, 2**63),
        SlotRef(1, 0, 1),
    ],
)
def test_references_are_checked_against_the_published_bytes(ref: SlotRef) -> None:
    slots = Slots()
    slots.send(b"0123456789")
    with pytest.raises(ProtocolMismatchError):
        slots.reader.view(ref)
    with pytest.raises(ProtocolMismatchError):
        slots.reader.release(ref)


def test_a_published_size_above_the_slot_s_size_is_refused() -> None:
    slots = Slots()
    slots.send(b"x")
    slots.memory[layout.SLOT_PAYLOAD_OFFSET + 7] = 0x7F
    with pytest.raises(ProtocolMismatchError, match=f"the {SMALL} bytes"):
        slots.reader.view(SlotRef(0, 0, SMALL + 1))
    with pytest.raises(ProtocolMismatchError, match="has a payload of"):
        slots.reader.check_integrity()


def test_a_slot_is_released_once() -> None:
    slots = Slots()
    ref = slots.send(b"x")
    slots.reader.release(ref)
    with pytest.raises(ProtocolMismatchError, match="not published"):
        slots.reader.release(ref)


def test_words_that_contradict_each_other_are_reported() -> None:
    slots = Slots()
    slots.memory[2 * SLOT_ENTRY_BYTES] = 2
    with pytest.raises(ProtocolMismatchError, match="slot 2 counts 2 publications and 0 releases"):
        slots.writer.check_integrity()


def test_both_words_only_grow() -> None:
    slots = Slots()
    for _ in range(300):
        slots.reader.release(slots.send(b"x"))
    assert slots.writer._published[0].load() == slots.writer._released[0].load() == 300


def test_payload_and_its_size_are_stored_before_the_publication() -> None:
    slots = Slots()
    stored: list[str] = []

    def recording(name: str, word: object) -> object:
        class Recorder:
            load = staticmethod(word.load)  # type: ignore[attr-defined]

            @staticmethod
            def store(value: int) -> None:
                stored.append(f"{name}={value} payload={slots.memory[DATA]}")
                word.store(value)  # type: ignore[attr-defined]

        return Recorder

    slots.writer._published[0] = recording("published", slots.writer._published[0])
    slots.writer._payload[0] = recording("nbytes", slots.writer._payload[0])
    slots.send(b"\7\7\7")
    assert stored == ["nbytes=3 payload=7", "published=1 payload=7"]


def test_a_forked_child_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots()
    ref, claimed = slots.send(b"x"), slots.writer.claim(1)
    assert claimed is not None
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    for use in (
        lambda: slots.writer.claim(1),
        claimed.publish,
        lambda: slots.reader.view(ref),
        lambda: slots.reader.release(ref),
    ):
        with pytest.raises(SegmentError, match=f"belong to process {pid}"):
            use()


def test_slots_of_a_real_segment_allocate_and_free_memory(client: Segment) -> None:
    def blocks() -> int:
        return os.fstat(client.fd).st_blocks * 512

    writer = SlotWriter(client.buffer, layout.REQUEST_SLOT_LAYOUT, client.allocate, client.discard)
    reader = SlotReader(client.buffer, layout.REQUEST_SLOT_LAYOUT)
    mib = 1024 * 1024
    assert blocks() == layout.ALLOCATED_BYTES[SegmentKind.CLIENT]
    slot = writer.claim(40 * mib)
    assert slot is not None
    slot.buffer[-1] = 1
    ref = slot.publish()
    assert blocks() == layout.ALLOCATED_BYTES[SegmentKind.CLIENT] + 40 * mib
    assert reader.view(ref)[-1] == 1
    reader.release(ref)
    assert writer.reclaim() == 8 * mib
    assert blocks() == layout.ALLOCATED_BYTES[SegmentKind.CLIENT] + layout.LARGE_SLOT_KEPT_BYTES
    assert writer.discard_unused() == layout.LARGE_SLOT_KEPT_BYTES
    assert blocks() == layout.ALLOCATED_BYTES[SegmentKind.CLIENT]
    writer.close()
    reader.close()


class SlotMachine(RuleBasedStateMachine):
    """Claims, publications, releases and reclaims in any order, compared with dictionaries."""

    CAPACITY = 60 * PAGE

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(self.CAPACITY)
        self.claimed: dict[int, tuple[Slot, bytes]] = {}
        self.published: dict[int, tuple[SlotRef, bytes]] = {}
        self.count = 0

    @property
    def taken(self) -> set[int]:
        return self.claimed.keys() | self.published.keys()

    def candidates(self, nbytes: int) -> range:
        if nbytes <= SMALL:
            return range(LARGE_SLOT)
        return range(FIRST_MEDIUM, LARGE_SLOT) if nbytes <= MEDIUM else range(LARGE_SLOT, NUM_SLOTS)

    @rule(
        nbytes=st.one_of(
            st.integers(0, LARGE), st.sampled_from([0, 1, SMALL, SMALL + 1, MEDIUM, MEDIUM + 1])
        )
    )
    def claim(self, nbytes: int) -> None:
        free = set(self.candidates(nbytes)) - self.taken
        try:
            slot = self.slots.writer.claim(nbytes)
        except NoSpaceError:
            assert free
            return
        if not free:
            assert slot is None
            return
        assert slot is not None
        assert slot.index in free
        assert len(slot.buffer) == nbytes
        self.count += 1
        payload = self.count.to_bytes(4, "little") * (nbytes // 4 + 1)
        slot.buffer[:] = payload[:nbytes]
        self.claimed[slot.index] = (slot, payload[:nbytes])

    @precondition(lambda self: self.claimed)
    @rule(data=st.data(), abort=st.booleans())
    def end_claim(self, data: st.DataObject, abort: bool) -> None:
        index = data.draw(st.sampled_from(sorted(self.claimed)))
        slot, payload = self.claimed.pop(index)
        if abort:
            slot.abort()
            return
        ref = slot.publish()
        assert ref == SlotRef(index, 0, len(payload))
        self.published[index] = (ref, payload)

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.published)))
        ref, _ = self.published.pop(index)
        self.slots.reader.release(ref)
        with pytest.raises(ProtocolMismatchError):
            self.slots.reader.release(ref)

    @rule()
    def reclaim(self) -> None:
        before = self.slots.writer.allocated_bytes
        assert self.slots.writer.reclaim() == before - self.slots.writer.allocated_bytes
        if LARGE_SLOT not in self.taken:
            assert not self.slots.writer.has_excess

    @rule()
    def discard_unused(self) -> None:
        self.slots.writer.discard_unused()
        if not self.taken:
            assert self.slots.writer.allocated_bytes == 0

    @invariant()
    def published_payloads_are_whole(self) -> None:
        for ref, payload in self.published.values():
            with self.slots.reader.view(ref) as view:
                assert view == payload

    @invariant()
    def the_counts_are_right(self) -> None:
        writer, pages = self.slots.writer, self.slots.pages
        writer.check_integrity()
        assert writer.num_free == NUM_SLOTS - len(self.taken)
        assert writer.allocated_bytes == len(pages.present) * PAGE <= self.CAPACITY
        payloads = {**self.claimed, **self.published}
        for index, (_, payload) in payloads.items():
            begin = writer._places[index].begin
            assert set(range(begin // PAGE, -(-(begin + len(payload)) // PAGE))) <= pages.present


class TestSlotMachine(SlotMachine.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
