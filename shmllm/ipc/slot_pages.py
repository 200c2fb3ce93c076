"""Pages under the slots: made when a payload first needs them, kept, and given back.

Owns how many bytes of memory stand behind each slot of one direction; must not know which
slots are lent. Kept in the writer's own memory: only the writer makes pages or gives them
back. A slot in use again costs no page faults, which are most of what fresh memory costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shmllm.errors import NoSpaceError
from shmllm.ipc.layout import SLOT_PAGES_STEP_BYTES, SlotLayout

ChangePages = Callable[[int, int], None]


class SlotPlace(NamedTuple):
    """Address space of one slot.

    Attributes:
        begin: offset in the segment.
        slot_bytes: size.
        kept_bytes: pages that the slot may keep once it is free again.
    """

    begin: int
    slot_bytes: int
    kept_bytes: int


def slot_places(layout: SlotLayout) -> list[SlotPlace]:
    """Where each slot lies, by index."""
    return [
        SlotPlace(each.data_offset + number * each.slot_bytes, each.slot_bytes, each.kept_bytes)
        for each in layout.classes
        for number in range(each.num_slots)
    ]


class SlotPages:
    """How many bytes from its start each slot has pages for.

    Args:
        places: of all slots.
        allocate: called with (offset, nbytes) in the segment; makes the pages exist or raises
            NoSpaceError and makes none.
        discard: called with (offset, nbytes) to give back what `allocate` made.
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
        """Whether it has more than it may keep."""
        return self.sizes[index] > self._places[index].kept_bytes

    def grow(self, index: int, nbytes: int, make_room: Callable[[], int]) -> None:
        """Have pages for at least `nbytes`.

        Args:
            index: of the slot.
            nbytes: at most the slot's size.
            make_room: called when shared memory is full; returns how many bytes it freed.

        Raises:
            NoSpaceError: there are none, and `make_room` could not help. Nothing changed.
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
        self.sizes[index] = want

    def shrink(self, index: int, nbytes: int) -> int:
        """Keep pages for the first `nbytes`; returns how many bytes were given back."""
        excess = self.sizes[index] - nbytes
        if excess <= 0:
            return 0
        self._discard(self._places[index].begin + nbytes, excess)
        self.sizes[index] = nbytes
        return excess

    def trim(self, index: int) -> int:
        """Give back what is above the slot's bound."""
        return self.shrink(index, self._places[index].kept_bytes)
