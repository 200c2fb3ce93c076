from __future__ import annotations

import numpy as np
import pytest

from shmllm.errors import MessageTooLargeError, NoSpaceError, ProtocolMismatchError
from shmllm.ipc.layout import SLOT_ENTRY_BYTES, SlotLayout
from shmllm.ipc.slots import SlotReader, SlotRef, SlotWriter

SLOT = 4096
LAYOUT = SlotLayout(table_offset=0, data_offset=4096, num_slots=3, slot_bytes=SLOT)


class Slots:
    """Both ends over ordinary memory, and a list of what was allocated."""

    def __init__(self) -> None:
        self.memory = bytearray(4096 + 3 * SLOT)
        self.allocated: list[tuple[int, int]] = []
        view = memoryview(self.memory)
        self.writer = SlotWriter(view, LAYOUT, lambda *area: self.allocated.append(area))
        self.reader = SlotReader(view, LAYOUT)

    def send(self, payload: bytes) -> SlotRef:
        slot = self.writer.claim(len(payload))
        assert slot is not None
        slot.buffer[:] = payload
        return slot.publish()


def test_an_array_arrives_in_place() -> None:
    slots = Slots()
    array = np.arange(100, dtype=np.float32).reshape(10, 10)
    ref = slots.send(array.tobytes())
    assert ref == SlotRef(0, 0, array.nbytes)
    with slots.reader.view(ref) as view:
        assert view.readonly
        assert np.array_equal(np.frombuffer(view, dtype=np.float32).reshape(10, 10), array)
    slots.reader.release(ref)
    assert slots.writer.num_free == 3
    slots.writer.check_integrity()


def test_a_reference_may_point_into_a_slot() -> None:
    slots = Slots()
    ref = slots.send(b"0123456789")
    assert bytes(slots.reader.view(SlotRef(ref.slot, 4, 3))) == b"456"


def test_none_while_all_are_lent() -> None:
    slots = Slots()
    refs = [slots.send(bytes([n])) for n in range(3)]
    assert slots.writer.claim(1) is None
    slots.reader.release(refs[1])
    slot = slots.writer.claim(1)
    assert slot is not None
    assert slot.index == 1
    assert bytes(slots.reader.view(refs[2])) == b"\2"


def test_a_claimed_slot_is_not_given_out_twice_and_an_aborted_one_again() -> None:
    slots = Slots()
    claimed = [slots.writer.claim(1) for _ in range(3)]
    assert slots.writer.claim(1) is None
    assert claimed[0] is not None
    claimed[0].abort()
    assert slots.writer.num_free == 1
    with pytest.raises(ProtocolMismatchError, match="not lent"):
        slots.reader.view(SlotRef(0, 0, 1))


@pytest.mark.parametrize("first", ["publish", "abort"])
@pytest.mark.parametrize("second", ["publish", "abort"])
def test_a_claim_ends_once(first: str, second: str) -> None:
    slot = Slots().writer.claim(1)
    getattr(slot, first)()
    with pytest.raises(RuntimeError, match="already"):
        getattr(slot, second)()


def test_pages_are_allocated_at_first_use_and_used_slots_are_preferred() -> None:
    slots = Slots()
    assert slots.allocated == []
    for _ in range(5):
        slots.reader.release(slots.send(b"x"))
    assert slots.allocated == [(4096, SLOT)]
    first, _ = slots.send(b"x"), slots.send(b"y")
    assert slots.allocated == [(4096, SLOT), (4096 + SLOT, SLOT)]
    slots.reader.release(first)


def test_no_space_claims_nothing() -> None:
    def refuse(offset: int, nbytes: int) -> None:
        raise NoSpaceError("full")

    writer = SlotWriter(memoryview(bytearray(4096 + 3 * SLOT)), LAYOUT, refuse)
    with pytest.raises(NoSpaceError):
        writer.claim(1)
    assert writer.num_free == 3


@pytest.mark.parametrize("nbytes", [SLOT + 1, -1])
def test_larger_than_a_slot_is_refused_with_both_sizes(nbytes: int) -> None:
    with pytest.raises(MessageTooLargeError, match=rf"{nbytes} bytes exceeds .* {SLOT} bytes"):
        Slots().writer.claim(nbytes)


@pytest.mark.parametrize(
    "ref",
    [
        SlotRef(-1, 0, 1),
        SlotRef(3, 0, 1),
        SlotRef(0, -1, 1),
        SlotRef(0, 0, -1),
        SlotRef(0, 1, SLOT),
        SlotRef(0, SLOT + 1, 0),
        SlotRef(1, 0, 1),
    ],
)
def test_references_are_checked(ref: SlotRef) -> None:
    slots = Slots()
    slots.send(b"x")
    with pytest.raises(ProtocolMismatchError):
        slots.reader.view(ref)
    with pytest.raises(ProtocolMismatchError):
        slots.reader.release(ref)


def test_a_slot_is_released_once() -> None:
    slots = Slots()
    ref = slots.send(b"x")
    slots.reader.release(ref)
    with pytest.raises(ProtocolMismatchError, match="not lent"):
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
