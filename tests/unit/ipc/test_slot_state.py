"""Observers see which slots are loaned, to which side, and since when."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from shmllm.errors import NoSpaceError
from shmllm.ipc.layout import REQUEST_SLOT_LAYOUT, SMALL_SLOT_BYTES
from shmllm.ipc.segment import Segment
from shmllm.ipc.slot_state import LoanedSlot, loaned_slots
from shmllm.ipc.slots import SlotReader, SlotWriter
from shmllm.ipc.states import SegmentKind


@pytest.fixture
def writer(client: Segment) -> Iterator[SlotWriter]:
    assert client.kind is SegmentKind.CLIENT
    writer = SlotWriter(client.buffer, REQUEST_SLOT_LAYOUT, client.allocate, client.discard)
    yield writer
    writer.close()


@pytest.fixture
def reader(client: Segment) -> Iterator[SlotReader]:
    reader = SlotReader(client.buffer, REQUEST_SLOT_LAYOUT)
    yield reader
    reader.close()


def loans(client: Segment) -> list[LoanedSlot]:
    return loaned_slots(client.buffer.toreadonly(), REQUEST_SLOT_LAYOUT)


def test_a_slot_is_loaned_to_its_writer_and_then_to_its_reader(
    client: Segment, writer: SlotWriter, reader: SlotReader
) -> None:
    assert loans(client) == []
    began_ns = time.monotonic_ns()
    slot = writer.claim(1000)
    assert slot is not None
    (claimed,) = loans(client)
    assert (claimed.index, claimed.is_published) == (0, False)
    assert claimed.nbytes == SMALL_SLOT_BYTES
    ref = slot.publish()
    (published,) = loans(client)
    assert (published.index, published.is_published, published.nbytes) == (0, True, 1000)
    assert began_ns <= claimed.since_ns <= published.since_ns <= time.monotonic_ns()
    reader.release(ref)
    assert loans(client) == []


def test_a_slot_that_is_used_again_has_new_times(
    client: Segment, writer: SlotWriter, reader: SlotReader
) -> None:
    slot = writer.claim(1000)
    assert slot is not None
    reader.release(slot.publish())
    later_ns = time.monotonic_ns()
    slot = writer.claim(10)
    assert slot is not None
    (claimed,) = loans(client)
    assert not claimed.is_published
    assert claimed.since_ns >= later_ns
    slot.publish()
    (published,) = loans(client)
    assert published.is_published
    assert published.since_ns >= later_ns


def test_a_claim_that_ends_without_a_publication_leaves_a_free_slot(
    client: Segment, writer: SlotWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = writer.claim(1), writer.claim(SMALL_SLOT_BYTES + 1)
    assert first is not None
    assert second is not None
    assert [loan.index for loan in loans(client)] == [0, 16]
    second.abort()
    assert [loan.index for loan in loans(client)] == [0]

    def full(*_: object, **__: object) -> None:
        raise NoSpaceError("full")

    monkeypatch.setattr(type(writer._pages), "grow", full)
    with pytest.raises(NoSpaceError):
        writer.claim(1)
    assert [loan.index for loan in loans(client)] == [0]
