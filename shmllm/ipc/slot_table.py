"""The words of the tensor slots, as both ends read them.

Owns where a slot's words and bytes are, and what contradicts itself; must not know who may
store what: `slots` does. A slot has two words that only grow, the writer's count of
publications and the reader's of releases. Equal means free, one apart means lent.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from shmllm.errors import ProtocolMismatchError, SegmentError
from shmllm.ipc.layout import (
    SLOT_ENTRY_BYTES,
    SLOT_PAYLOAD_OFFSET,
    SLOT_PUBLISHED_OFFSET,
    SLOT_RELEASED_OFFSET,
    SlotLayout,
)
from shmllm.ipc.slot_pages import slot_places
from shmllm.ipc.words import Word


class SlotRef(NamedTuple):
    """Where a payload lies; three integers, so that it can travel in a record.

    Attributes:
        slot: index of the slot.
        offset: in bytes from the start of the slot.
        nbytes: size of the payload.
    """

    slot: int
    offset: int
    nbytes: int


class SlotEnd:
    """What the lending and the borrowing end share.

    Args:
        buffer: of the segment.
        layout: of this direction's slots.
    """

    __slots__ = ("_memory", "_payload", "_pid", "_places", "_published", "_released")

    def __init__(self, buffer: memoryview, layout: SlotLayout) -> None:
        self._pid = os.getpid()
        self._places = slot_places(layout)
        self._memory = buffer[: max(place.begin + place.slot_bytes for place in self._places)]
        entries = [layout.table_offset + i * SLOT_ENTRY_BYTES for i in range(len(self._places))]
        self._published = [Word(buffer, entry + SLOT_PUBLISHED_OFFSET) for entry in entries]
        self._payload = [Word(buffer, entry + SLOT_PAYLOAD_OFFSET) for entry in entries]
        self._released = [Word(buffer, entry + SLOT_RELEASED_OFFSET) for entry in entries]

    @property
    def num_slots(self) -> int:
        """Slots of all sizes, free or not."""
        return len(self._places)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise SegmentError(
                f"these tensor slots belong to process {self._pid}; the forked process "
                f"{os.getpid()} cannot use them: create a segment of its own after the fork"
            )

    def _num_lent(self, index: int) -> int:
        # SYNC POINT: slot published, slot released
        lent = self._published[index].load() - self._released[index].load()
        if lent not in (0, 1):
            raise ProtocolMismatchError(
                f"slot {index} counts {self._published[index].load()} publications and "
                f"{self._released[index].load()} releases; memory is damaged"
            )
        return lent

    def check_integrity(self) -> None:
        """Raise ProtocolMismatchError if any slot's words contradict each other."""
        for index, place in enumerate(self._places):
            self._num_lent(index)
            nbytes = self._payload[index].load()
            if nbytes > place.slot_bytes:
                raise ProtocolMismatchError(
                    f"slot {index} of {place.slot_bytes} bytes says it holds {nbytes}; memory is "
                    "damaged"
                )

    def close(self) -> None:
        """Let go of the segment; any later use raises ValueError."""
        self._memory.release()
        for word in (*self._published, *self._payload, *self._released):
            word.close()
