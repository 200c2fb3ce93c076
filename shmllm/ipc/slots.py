"""Tensor slots: fixed blocks of shared memory for payloads too large for a ring.

Owns which slots are lent; must not know what lies in one or how a reference travels. A slot
has two words that only grow: the writer counts how often it published the slot, the reader
how often it gave it back. Equal means free. Pages are allocated when a slot is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shmllm.errors import MessageTooLargeError, ProtocolMismatchError
from shmllm.ipc.layout import (
    SLOT_ENTRY_BYTES,
    SLOT_PUBLISHED_OFFSET,
    SLOT_RELEASED_OFFSET,
    SlotLayout,
)
from shmllm.ipc.words import PlainWord, Word


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


class Slot:
    """A claimed slot. Fill `buffer`, then `publish` it or `abort`.

    Attributes:
        index: of the slot.
        buffer: writable, as large as was asked for, aligned to a page.
    """

    __slots__ = ("_owner", "buffer", "index")

    def __init__(self, owner: SlotWriter, index: int, buffer: memoryview) -> None:
        self._owner: SlotWriter | None = owner
        self.index = index
        self.buffer = buffer

    def publish(self) -> SlotRef:
        """Lend the slot to the reader; returns what the message that names it carries."""
        ref = SlotRef(self.index, 0, len(self.buffer))
        self._take_owner()._publish(self.index)
        return ref

    def abort(self) -> None:
        """Give the slot back unpublished."""
        self._take_owner()._abort(self.index)

    def _take_owner(self) -> SlotWriter:
        if self._owner is None:
            raise RuntimeError(f"slot {self.index} was published or aborted already")
        owner, self._owner = self._owner, None
        return owner


class _SlotEnd:
    __slots__ = ("_data", "_layout", "_published", "_released")

    def __init__(self, buffer: memoryview, layout: SlotLayout) -> None:
        end = layout.data_offset + layout.num_slots * layout.slot_bytes
        self._data = buffer[layout.data_offset : end]
        self._layout = layout
        entries = [layout.table_offset + i * SLOT_ENTRY_BYTES for i in range(layout.num_slots)]
        self._published = [Word(buffer, entry + SLOT_PUBLISHED_OFFSET) for entry in entries]
        self._released = [Word(buffer, entry + SLOT_RELEASED_OFFSET) for entry in entries]

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
        """Raise ProtocolMismatchError if any slot's two words contradict each other."""
        for index in range(self._layout.num_slots):
            self._num_lent(index)

    def close(self) -> None:
        """Let go of the segment; any later use raises ValueError."""
        self._data.release()
        for word in (*self._published, *self._released):
            word.close()


class SlotWriter(_SlotEnd):
    """The lending end.

    Args:
        buffer: of the segment.
        layout: of this direction's slots.
        allocate: called with (offset, nbytes) in the segment before a slot's first use;
            makes its pages exist or raises NoSpaceError.
    """

    __slots__ = ("_allocate", "_allocated", "_claimed")

    def __init__(
        self, buffer: memoryview, layout: SlotLayout, allocate: Callable[[int, int], None]
    ) -> None:
        super().__init__(buffer, layout)
        self._allocate = allocate
        self._allocated: set[int] = set()
        self._claimed: set[int] = set()

    @property
    def max_bytes(self) -> int:
        """Largest payload of one slot."""
        return self._layout.slot_bytes

    @property
    def num_free(self) -> int:
        """Slots that `claim` could give out now."""
        return sum(self._is_free(index) for index in range(self._layout.num_slots))

    def claim(self, nbytes: int) -> Slot | None:
        """A slot to fill with `nbytes` bytes, or None while all are lent.

        Slots that already have pages are preferred.

        Raises:
            MessageTooLargeError: larger than a slot.
            NoSpaceError: shared memory is full; nothing is claimed.
        """
        if not 0 <= nbytes <= self._layout.slot_bytes:
            raise MessageTooLargeError(
                f"a payload of {nbytes} bytes exceeds a tensor slot of "
                f"{self._layout.slot_bytes} bytes; send it in parts"
            )
        free = [index for index in range(self._layout.num_slots) if self._is_free(index)]
        if not free:
            return None
        index = next((index for index in free if index in self._allocated), free[0])
        begin = index * self._layout.slot_bytes
        if index not in self._allocated:
            self._allocate(self._layout.data_offset + begin, self._layout.slot_bytes)
            self._allocated.add(index)
        self._claimed.add(index)
        return Slot(self, index, self._data[begin : begin + nbytes])

    def _is_free(self, index: int) -> bool:
        return index not in self._claimed and not self._num_lent(index)

    def _publish(self, index: int) -> None:
        self._claimed.remove(index)
        word = self._published[index]
        # SYNC POINT: slot published. After the payload was written.
        word.store(word.load() + 1)

    def _abort(self, index: int) -> None:
        self._claimed.remove(index)


class SlotReader(_SlotEnd):
    """The borrowing end.

    Args:
        buffer: of the segment.
        layout: of this direction's slots.
    """

    __slots__ = ()

    def view(self, ref: SlotRef) -> memoryview:
        """The payload, read-only and in place; valid until `release(ref)`.

        Raises:
            ProtocolMismatchError: the reference leaves its slot, or the slot is not lent.
        """
        self._check(ref)
        begin = ref.slot * self._layout.slot_bytes + ref.offset
        return self._data[begin : begin + ref.nbytes].toreadonly()

    def release(self, ref: SlotRef) -> None:
        """Give the slot back, once for each publication; its views must not be used again.

        Raises:
            ProtocolMismatchError: as for `view`.
        """
        self._check(ref)
        word: PlainWord = self._released[ref.slot]
        # SYNC POINT: slot released. After the last read of the payload.
        word.store(word.load() + 1)

    def _check(self, ref: SlotRef) -> None:
        slot, offset, nbytes = ref
        layout = self._layout
        inside = (
            0 <= slot < layout.num_slots
            and offset >= 0
            and nbytes >= 0
            and offset + nbytes <= layout.slot_bytes
        )
        if not inside:
            raise ProtocolMismatchError(
                f"{ref} does not lie in one of {layout.num_slots} slots of "
                f"{layout.slot_bytes} bytes"
            )
        if not self._num_lent(slot):
            raise ProtocolMismatchError(f"{ref} names a slot that is not lent")
