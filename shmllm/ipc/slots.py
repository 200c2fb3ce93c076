"""Tensor slots: blocks of shared memory for payloads too large for a ring.

Owns which slots are lent; must not know what lies in one or how a reference travels. A slot
has two words that only grow: the writer counts how often it published the slot, the reader
how often it gave it back. Equal means free. A slot is address space; `slot_pages` knows how
much memory stands behind it.
"""

from __future__ import annotations

from shmllm.errors import MessageTooLargeError, ProtocolMismatchError
from shmllm.ipc.layout import SlotLayout
from shmllm.ipc.slot_pages import ChangePages, SlotPages
from shmllm.ipc.slot_table import SlotEnd, SlotRef
from shmllm.ipc.words import PlainWord

__all__ = ["Slot", "SlotReader", "SlotRef", "SlotWriter"]


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
        self._take_owner()._publish(ref)
        return ref

    def abort(self) -> None:
        """Give the slot back unpublished."""
        self._take_owner()._end_claim(self.index)

    def _take_owner(self) -> SlotWriter:
        if self._owner is None:
            raise RuntimeError(f"slot {self.index} was published or aborted already")
        owner, self._owner = self._owner, None
        return owner


class SlotWriter(SlotEnd):
    """The lending end.

    Args:
        buffer: of the segment.
        layout: of this direction's slots.
        allocate: called with (offset, nbytes) in the segment before pages are first used;
            makes them exist or raises NoSpaceError.
        discard: called with (offset, nbytes) to give pages back that `allocate` made.
    """

    __slots__ = ("_claimed", "_excess", "_pages", "_sizes")

    def __init__(
        self,
        buffer: memoryview,
        layout: SlotLayout,
        allocate: ChangePages,
        discard: ChangePages,
    ) -> None:
        super().__init__(buffer, layout)
        self._pages = SlotPages(self._places, allocate, discard)
        self._claimed: set[int] = set()
        self._excess: set[int] = set()
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
        """Largest payload of any slot."""
        return self._sizes[-1][0]

    @property
    def num_free(self) -> int:
        """Slots of all sizes that `claim` could give out now."""
        return sum(self._is_free(index) for index in range(self.num_slots))

    @property
    def has_excess(self) -> bool:
        """Whether `reclaim` may have something to give back, as soon as it is released."""
        return bool(self._excess)

    @property
    def allocated_bytes(self) -> int:
        """Shared memory that the slots hold now, lent or not."""
        return sum(self._pages.sizes)

    def num_slots_for(self, nbytes: int) -> int:
        """How many slots, free or not, a payload of this size may lie in.

        Raises:
            MessageTooLargeError: it fits into none.
        """
        return sum(map(len, self._groups(nbytes)))

    def claim(self, nbytes: int) -> Slot | None:
        """A slot to fill with `nbytes` bytes, or None while all that are meant for it are lent.

        The smallest size that holds it comes first, and in it a slot that has the pages.

        Raises:
            MessageTooLargeError: larger than any slot.
            NoSpaceError: shared memory is full; nothing is claimed.
        """
        self._check_process()
        index = self._choose(nbytes)
        if index is None:
            return None
        self._claimed.add(index)
        try:
            if self._excess:
                self.reclaim()
            self._pages.grow(index, nbytes, make_room=self.discard_unused)
        except BaseException:
            self._end_claim(index)
            raise
        begin = self._places[index].begin
        return Slot(self, index, self._memory[begin : begin + nbytes])

    def reclaim(self) -> int:
        """Give pages above their slots' bounds back to the system; returns how many bytes.

        `claim` does so too. Call it when idle, or the last large payload keeps its pages
        until the next one. Takes about half a second for each GiB.
        """
        done = [index for index in self._excess if self._is_free(index)]
        self._excess.difference_update(done)
        return sum(map(self._pages.trim, done))

    def discard_unused(self) -> int:
        """Give the pages of all free slots back to the system; returns how many bytes."""
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
        return index not in self._claimed and not self._num_lent(index)

    def _publish(self, ref: SlotRef) -> None:
        self._check_process()
        index = ref.slot
        self._end_claim(index)
        self._payload[index].store(ref.nbytes)
        word = self._published[index]
        # SYNC POINT: slot published. After the payload was written.
        word.store(word.load() + 1)

    def _end_claim(self, index: int) -> None:
        self._claimed.remove(index)
        if self._pages.has_excess(index):
            self._excess.add(index)


class SlotReader(SlotEnd):
    """The borrowing end.

    Args:
        buffer: of the segment.
        layout: of this direction's slots.
    """

    __slots__ = ()

    def view(self, ref: SlotRef) -> memoryview:
        """The payload, read-only and in place; valid until `release(ref)`.

        Raises:
            ProtocolMismatchError: the reference leaves what was published in its slot, or
                the slot is not lent.
        """
        return self.borrow(ref).toreadonly()

    def borrow(self, ref: SlotRef) -> memoryview:
        """As `view`, but writable, for consumers that take nothing else and only read."""
        self._check(ref)
        begin = self._places[ref.slot].begin + ref.offset
        return self._memory[begin : begin + ref.nbytes]

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
        self._check_process()
        slot, offset, nbytes = ref
        if not 0 <= slot < self.num_slots:
            raise ProtocolMismatchError(f"{ref} does not lie in one of {self.num_slots} slots")
        if not self._num_lent(slot):
            raise ProtocolMismatchError(f"{ref} names a slot that is not lent")
        # Pages exist only for what was published: a look behind it would make new ones, or
        # end this process with SIGBUS where there is no room for them.
        published = min(self._payload[slot].load(), self._places[slot].slot_bytes)
        if offset < 0 or nbytes < 0 or offset + nbytes > published:
            raise ProtocolMismatchError(
                f"{ref} does not lie in the {published} bytes that were published in slot {slot}"
            )
