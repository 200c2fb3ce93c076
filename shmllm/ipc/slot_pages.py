"""The memory pages of tensor slots, allocated when a payload needs them and freed later.

This module owns the number of allocated bytes of each slot of one direction. It must not know
which slots are in use. The numbers lie in the writer's private memory, because only the writer
allocates and frees pages. A slot that already has its pages costs no page faults, which are the
largest part of the cost of new memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shmllm.errors import NoSpaceError
from shmllm.ipc.layout import SLOT_PAGES_STEP_BYTES, SlotLayout

ChangePages = Callable[[int, int], None]


class SlotPlace(NamedTuple):
    """The address space of one slot.

    Attributes:
        begin: the byte offset in the segment.
        slot_bytes: the size of the slot.
        kept_bytes: the largest number of bytes that the slot keeps allocated while it is free.
    """

    begin: int
    slot_bytes: int
    kept_bytes: int


def slot_places(layout: SlotLayout) -> list[SlotPlace]:
    """The address space of each slot, by the slot's index."""
    return [
        SlotPlace(each.data_offset + number * each.slot_bytes, each.slot_bytes, each.kept_bytes)
        for each in layout.classes
        for number in range(each.num_slots)
    ]


class SlotPages:
    """Allocates and frees the pages of all slots of one direction.

    Args:
        places: the address space of each slot.
        allocate: a function (offset in the segment, bytes) that allocates pages, or raises
            NoSpaceError and allocates none.
        discard: a function (offset in the segment, bytes) that frees allocated pages.

    Attributes:
        sizes: the allocated bytes of each slot, counted from the slot's beginning.
    """

    __slots__ = ("_allocate", "_discard", "_places", "sizes")

    def __init__(
        self, places: Sequence[SlotPlace], allocate: ChangePages, discard: ChangePages
    ) -> None:
        self._places = places
        self._allocate = allocate
        self._discard = discard
        self.sizes = [0] * len(places)

    def has_excess(self, index: int) -> bool:
        """Whether a slot has more allocated bytes than it may keep while it is free."""
        return self.sizes[index] > self._places[index].kept_bytes

    def grow(self, index: int, nbytes: int, make_room: Callable[[], int]) -> None:
        """Ensure that a slot has pages for at least `nbytes` bytes.

        Args:
            index: the index of the slot.
            nbytes: the needed bytes, at most the slot's size.
            make_room: a function that frees other pages and returns how many bytes it freed. It
                is called only when shared memory is full.

        Raises:
            NoSpaceError: shared memory is full, and `make_room` did not free enough. The slot
                keeps its pages.
        """
        have = self.sizes[index]
        if nbytes <= have:
            return
        begin, slot_bytes, _ = self._places[index]
        steps = -(-nbytes // SLOT_PAGES_STEP_BYTES)
        want = min(steps * SLOT_PAGES_STEP_BYTES, slot_bytes)
        try:
            self._allocate(begin + have, want - have)
        except NoSpaceError:
            if not make_room():
                raise
            self._allocate(begin + have, want - have)
        except BaseException:  # of a signal handler: some of the pages may be allocated
            self._discard(begin + have, want - have)
            raise
        self.sizes[index] = want

    def shrink(self, index: int, nbytes: int) -> int:
        """Free a slot's pages after its first `nbytes` bytes; returns the number of freed bytes."""
        excess = self.sizes[index] - nbytes
        if excess <= 0:
            return 0
        # A size that is too small costs memory after an exception; one that is too large would let
        # the next payload be written to pages that do not exist, which ends the process (SIGBUS).
        self.sizes[index] = nbytes
        self._discard(self._places[index].begin + nbytes, excess)
        return excess

    def trim(self, index: int) -> int:
        """Free the bytes that a free slot may not keep; returns their number."""
        return self.shrink(index, self._places[index].kept_bytes)
