"""Reads which tensor slots are loaned without being an end of them, for tools and after a crash."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from shmllm.ipc.layout import (
    SLOT_CLAIMED_AT_OFFSET,
    SLOT_ENTRY_BYTES,
    SLOT_PAYLOAD_OFFSET,
    SLOT_PUBLISHED_AT_OFFSET,
    SLOT_PUBLISHED_OFFSET,
    SLOT_RELEASED_OFFSET,
    WORD_BYTES,
    SlotLayout,
)
from shmllm.ipc.slot_pages import slot_places
from shmllm.ipc.words import Numbers


@dataclass(frozen=True, slots=True)
class LoanedSlot:
    """A slot that is not free.

    Attributes:
        index: the index of the slot.
        is_published: whether the reader holds the slot: it is published and not released. If
            not, the writer has claimed it.
        nbytes: the size of the payload. For a claimed slot, the size of the slot.
        since_ns: when it was published or claimed, on `time.monotonic_ns()`.
    """

    index: int
    is_published: bool
    nbytes: int
    since_ns: int


def loaned_slots(buffer: memoryview, layout: SlotLayout) -> list[LoanedSlot]:
    """The slots of one direction that are not free.

    If the two ends use the slots at the same time, the words of a slot may belong to slightly
    different times.

    Args:
        buffer: the bytes of the segment, which may be read-only.
        layout: the layout of the slots in the segment.
    """
    found = []
    for index, place in enumerate(slot_places(layout)):
        begin = layout.table_offset + index * SLOT_ENTRY_BYTES
        with closing(Numbers(buffer, begin, SLOT_ENTRY_BYTES // WORD_BYTES)) as entry:
            words = entry.load_all()
        published, released, payload, published_at, claimed_at = (
            words[offset // WORD_BYTES]
            for offset in (
                SLOT_PUBLISHED_OFFSET,
                SLOT_RELEASED_OFFSET,
                SLOT_PAYLOAD_OFFSET,
                SLOT_PUBLISHED_AT_OFFSET,
                SLOT_CLAIMED_AT_OFFSET,
            )
        )
        if published != released:
            found.append(LoanedSlot(index, True, payload, published_at))
        elif claimed_at:
            found.append(LoanedSlot(index, False, place.slot_bytes, claimed_at))
    return found
