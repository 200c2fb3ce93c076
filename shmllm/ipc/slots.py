"""Tensor slots: blocks of shared memory for payloads that are too large for a ring.

This module owns the state of the slots of one direction. It must not know the contents of a slot,
nor how a reference to it is sent. Each slot has two words that only grow: the writer counts its
publications of the slot, the reader its releases. If the counts are equal, the slot is free. If
they differ by one, the slot is published and the reader holds it. A slot is address space;
`slot_pages` owns the memory in it.

For observers (`slot_state`), the writer also stores the times at which it claimed and published a
slot. The time of a claim is 0 again when the claim ends, with or without a publication. The time of
the last publication stays.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from shmllm.errors import MessageTooLargeError, ProtocolMismatchError, SegmentError
from shmllm.ipc.layout import (
    SLOT_CLAIMED_AT_OFFSET,
    SLOT_ENTRY_BYTES,
    SLOT_PAYLOAD_OFFSET,
    SLOT_PUBLISHED_AT_OFFSET,
    SLOT_PUBLISHED_OFFSET,
    SLOT_RELEASED_OFFSET,
    SlotLayout,
)
from shmllm.ipc.slot_pages import ChangePages, SlotPages, slot_places
from shmllm.ipc.words import PlainWord, Word

# A count that came so far could soon not be stored any more.
_IMPOSSIBLE_COUNT = 1 << 63


class SlotRef(NamedTuple):
    """The place of a payload: three integers, which fit into a record of a ring.

    Attributes:
        slot: the index of the slot.
        offset: the byte offset from the beginning of the slot.
        nbytes: the size of the payload.
    """

    slot: int
    offset: int
    nbytes: int


class _SlotEnd:
    """The base of both ends: the words and the memory of all slots of one direction.

    Args:
        buffer: the bytes of the segment.
        layout: the layout of the slots.
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
        """The number of slots of all sizes, free or not."""
        return len(self._places)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise SegmentError(
                f"these tensor slots belong to process {self._pid}; the forked process "
                f"{os.getpid()} cannot use them: create a segment of its own after the fork"
            )

    def _is_published(self, index: int) -> bool:
        # SYNC POINT: slot published, slot released
        published = self._published[index].load()
        num_held = published - self._released[index].load()
        if num_held not in (0, 1) or published >= _IMPOSSIBLE_COUNT:
            raise ProtocolMismatchError(
                f"slot {index} counts {self._published[index].load()} publications and "
                f"{self._released[index].load()} releases; memory is damaged"
            )
        return bool(num_held)

    def check_integrity(self) -> None:
        """Raise ProtocolMismatchError if the words of a slot contradict each other. Tests call
        this; only the two ends can, because the words change between two loads of another
        process."""
        for index, place in enumerate(self._places):
            self._is_published(index)
            nbytes = self._payload[index].load()
            if nbytes > place.slot_bytes:
                raise ProtocolMismatchError(
                    f"slot {index} of {place.slot_bytes} bytes has a payload of {nbytes} bytes; "
                    "memory is damaged"
                )

    def close(self) -> None:
        """Release the views of the segment; any later use raises ValueError."""
        self._memory.release()
        for word in (*self._published, *self._payload, *self._released):
            word.close()


class Slot:
    """A claimed slot. The caller fills `buffer` and then calls `publish` or `abort`.

    Attributes:
        index: the index of the slot.
        buffer: the writable memory, of the requested size, aligned to a page.
    """

    __slots__ = ("_owner", "buffer", "index")

    def __init__(self, owner: SlotWriter, index: int, buffer: memoryview) -> None:
        self._owner: SlotWriter | None = owner
        self.index = index
        self.buffer = buffer

    def publish(self) -> SlotRef:
        """Publish the slot for the reader; returns the reference for the message to the reader."""
        ref = SlotRef(self.index, 0, len(self.buffer))
        self._take_owner()._publish(ref)
        return ref

    def abort(self) -> None:
        """Free the slot without publishing it."""
        self._take_owner()._end_claim(self.index)

    def _take_owner(self) -> SlotWriter:
        if self._owner is None:
            raise RuntimeError(f"slot {self.index} was published or aborted already")
        owner, self._owner = self._owner, None
        return owner


class SlotWriter(_SlotEnd):
    """The end that fills and publishes slots.

    Args:
        buffer: the bytes of the segment.
        layout: the layout of the slots.
        allocate: a function (offset in the segment, bytes) that allocates pages or raises
            NoSpaceError. It is called before the first use of the pages.
        discard: a function (offset in the segment, bytes) that frees allocated pages.
    """

    __slots__ = (
        "_claimed",
        "_claimed_at",
        "_excess",
        "_pages",
        "_published_at",
        "_sizes",
        "_unsent",
    )

    def __init__(
        self,
        buffer: memoryview,
        layout: SlotLayout,
        allocate: ChangePages,
        discard: ChangePages,
    ) -> None:
        super().__init__(buffer, layout)
        entries = [layout.table_offset + i * SLOT_ENTRY_BYTES for i in range(self.num_slots)]
        self._claimed_at = [Word(buffer, entry + SLOT_CLAIMED_AT_OFFSET) for entry in entries]
        self._published_at = [Word(buffer, entry + SLOT_PUBLISHED_AT_OFFSET) for entry in entries]
        self._pages = SlotPages(self._places, allocate, discard)
        self._claimed: set[int] = set()
        self._excess: set[int] = set()
        self._unsent: dict[int, int] = {}
        self._sizes: list[tuple[int, list[range]]] = []
        first = 0
        for each in layout.classes:
            group = range(first, first + each.num_slots)
            if self._sizes and each.takes_smaller:
                self._sizes[-1][1].append(group)
            self._sizes.append((each.slot_bytes, [group]))
            first = group.stop

    @property
    def max_bytes(self) -> int:
        """The size of the largest slot, and therefore of the largest payload."""
        return self._sizes[-1][0]

    @property
    def num_free(self) -> int:
        """The number of free slots of all sizes; for tests."""
        return sum(self._is_free(index) for index in range(self.num_slots))

    @property
    def has_published(self) -> bool:
        """Whether the reader holds a slot of any size, which it is going to release."""
        return any(map(self._is_published, range(self.num_slots)))

    @property
    def has_excess(self) -> bool:
        """Whether some slot has more pages than a free slot may keep. `reclaim` frees them as
        soon as the reader has released the slot."""
        return bool(self._excess)

    @property
    def allocated_bytes(self) -> int:
        """The allocated bytes of all slots, free or not; for tests."""
        return sum(self._pages.sizes)

    def num_slots_for(self, nbytes: int) -> int:
        """The number of slots, free or not, that `claim` may use for a payload of this size.

        Raises:
            MessageTooLargeError: the payload is larger than any slot.
        """
        return sum(map(len, self._groups(nbytes)))

    def claim(self, nbytes: int) -> Slot | None:
        """Claim a free slot for a payload of `nbytes` bytes.

        The slot comes from the smallest size that holds the payload, or from the next size if
        that one may take smaller payloads. A slot that already has enough pages is preferred.

        Returns:
            None if none of these slots is free.

        Raises:
            MessageTooLargeError: the payload is larger than any slot.
            NoSpaceError: shared memory is full; no slot is claimed.
        """
        self._check_process()
        index = self._choose(nbytes)
        if index is None:
            return None
        try:
            self._unsent[index] = self._published[index].load()
            self._claimed.add(index)
            self._claimed_at[index].store(time.monotonic_ns())
            if self._excess:
                self.reclaim()
            self._pages.grow(index, nbytes, make_room=self.discard_unused)
            begin = self._places[index].begin
            return Slot(self, index, self._memory[begin : begin + nbytes])
        except BaseException:
            self._end_claim(index)
            raise

    def begin_message(self) -> None:
        """Forget which slots were claimed before; see `take_back`."""
        self._unsent.clear()

    def take_back(self) -> None:
        """Free the slots that were claimed since the last `begin_message`, published or not.

        The caller calls this after an exception, if the reader has got no reference to them.
        """
        for index in list(self._unsent):
            self.take_back_one(index, self._unsent[index])
        self._unsent.clear()

    def num_publications(self, index: int) -> int:
        """How often a slot was published, for `take_back_one`."""
        return self._published[index].load()

    def take_back_one(self, index: int, num_publications: int) -> None:
        """Free a slot that was claimed when it had been published `num_publications` times. The
        reader must not have got a reference to it since. Idempotent."""
        self._end_claim(index)
        if self._published[index].load() != num_publications:
            self._published[index].store(num_publications)

    def reclaim(self) -> int:
        """Free the pages that free slots may not keep; returns the number of freed bytes.

        `claim` does this too. Without a call of this method while idle, the pages of the last
        large payload stay allocated until the next `claim`. The call takes about half a second
        for each GiB.
        """
        freed = 0
        for index in [index for index in self._excess if self._is_free(index)]:
            freed += self._pages.trim(index)
            self._excess.discard(index)  # after `trim`, which an exception may have ended
        return freed

    def discard_unused(self) -> int:
        """Free the pages of all free slots; returns the number of freed bytes."""
        free = [index for index in range(self.num_slots) if self._is_free(index)]
        return sum(self._pages.shrink(index, 0) for index in free)

    def _groups(self, nbytes: int) -> list[range]:
        for slot_bytes, groups in self._sizes:
            if 0 <= nbytes <= slot_bytes:
                return groups
        raise MessageTooLargeError(
            f"a payload of {nbytes} bytes exceeds a tensor slot of {self.max_bytes} bytes; send "
            "it in parts"
        )

    def _choose(self, nbytes: int) -> int | None:
        pages = self._pages.sizes
        for group in self._groups(nbytes):
            best = None
            for index in group:
                if not self._is_free(index):
                    continue
                if pages[index] >= nbytes:
                    return index
                if best is None or pages[index] > pages[best]:
                    best = index
            if best is not None:
                return best
        return None

    def _is_free(self, index: int) -> bool:
        return index not in self._claimed and not self._is_published(index)

    def _publish(self, ref: SlotRef) -> None:
        self._check_process()
        index = ref.slot
        self._end_claim(index)
        self._payload[index].store(ref.nbytes)
        self._published_at[index].store(time.monotonic_ns())
        word = self._published[index]
        # SYNC POINT: slot published. After the last store to the payload.
        word.store(word.load() + 1)

    def _end_claim(self, index: int) -> None:
        self._claimed.discard(index)
        self._claimed_at[index].store(0)
        if self._pages.has_excess(index):
            self._excess.add(index)

    def close(self) -> None:
        super().close()
        for word in (*self._claimed_at, *self._published_at):
            word.close()


class SlotReader(_SlotEnd):
    """The end that reads published slots and releases them.

    Args:
        buffer: the bytes of the segment.
        layout: the layout of the slots.
    """

    __slots__ = ()

    def view(self, ref: SlotRef) -> memoryview:
        """A read-only view of the payload, without a copy; valid until `release(ref)`.

        Raises:
            ProtocolMismatchError: the slot is not published, or the reference goes beyond the
                published bytes.
        """
        return self.writable_view(ref).toreadonly()

    def writable_view(self, ref: SlotRef) -> memoryview:
        """The same as `view`, but writable, for libraries that accept only writable memory. The
        caller must not write."""
        self._check(ref)
        begin = self._places[ref.slot].begin + ref.offset
        return self._memory[begin : begin + ref.nbytes]

    def release(self, ref: SlotRef) -> None:
        """Release the slot for its writer. The caller releases each publication once, and must
        not use views of the payload after that.

        Raises:
            ProtocolMismatchError: as for `view`.
        """
        self._check(ref)
        word: PlainWord = self._released[ref.slot]
        # SYNC POINT: slot released. After the last read of the payload.
        word.store(word.load() + 1)

    def _check(self, ref: SlotRef) -> None:
        self._check_process()
        slot, offset, nbytes = ref
        if not 0 <= slot < self.num_slots:
            raise ProtocolMismatchError(f"{ref} does not lie in one of {self.num_slots} slots")
        if not self._is_published(slot):
            raise ProtocolMismatchError(f"{ref} names a slot that is not published")
        # Only published bytes are sure to have pages. A read beyond them would allocate new pages,
        # or end this process with SIGBUS if shared memory is full.
        published = min(self._payload[slot].load(), self._places[slot].slot_bytes)
        if offset < 0 or nbytes < 0 or offset + nbytes > published:
            raise ProtocolMismatchError(
                f"{ref} does not lie in the {published} bytes that were published in slot {slot}"
            )
