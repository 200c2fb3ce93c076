"""The blocks of the own region: which are free, which is reused next, and when that is allowed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from shmllm.shared_kv.own_region import OwnRegion
from shmllm.shared_kv.region import Region

LONGEST_LOOK = 256
"""How many blocks that are read now are passed over in search of one that can be reused."""


class Store:
    """The blocks of one section of the own region.

    Args:
        region: the region.
        section: the index of the section.
    """

    def __init__(self, region: OwnRegion, section: int) -> None:
        self._region, self._section = region, section
        self._blocks: OrderedDict[bytes, int] = OrderedDict()
        for block, key in region.entries(section):
            if key in self._blocks:  # only in a damaged table
                region.invalidate(section, block)
                region.forget(section, block)
            else:
                self._blocks[key] = block
        used = set(self._blocks.values())
        # An owner that was killed may have invalidated a block that somebody still reads.
        self._doubtful = region.invalidated(section)
        used.update(self._doubtful)
        num_blocks = region.layout.sections[section].num_blocks
        self._free = [block for block in reversed(range(num_blocks)) if block not in used]
        self._pending: dict[int, bytes] = {}
        self._own_readers: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def borrow(self, key: bytes) -> int | None:
        """Begin to read the block of a key in this process; None if there is none."""
        block = self._blocks.get(key)
        if block is not None:
            self._blocks.move_to_end(key)
            self._own_readers[block] = self._own_readers.get(block, 0) + 1
        return block

    def give_back(self, block: int) -> None:
        """End to read a block in this process."""
        self._own_readers[block] -= 1
        if not self._own_readers[block]:
            del self._own_readers[block]

    def look_again(self, readers: Sequence[Region]) -> None:
        """Free those of the blocks that an earlier owner has invalidated which nobody reads."""
        if self._doubtful:
            doubtful, self._doubtful = self._doubtful, []
            for block in doubtful:
                is_read = self._is_read(block, readers)
                (self._doubtful if is_read else self._free).append(block)

    def candidates(self, count: int, readers: Sequence[Region]) -> list[bytes]:
        """Invalidate up to `count` blocks that seem to have no reader, the least recently used
        first. `settle` has to be called with them, and with the readers that exist then."""
        found: list[bytes] = []
        passed: list[bytes] = []
        for key, block in self._blocks.items():
            if len(found) == count or len(passed) == LONGEST_LOOK:
                break
            (passed if self._is_read(block, readers) else found).append(key)
        for key in passed:
            self._blocks.move_to_end(key)
        for key in found:
            self._region.invalidate(self._section, self._blocks[key])
        return found

    def settle(self, candidates: Iterable[bytes], readers: Sequence[Region]) -> None:
        """Free those of the candidates that nobody reads; the others stay valid."""
        for key in candidates:
            block = self._blocks[key]
            if self._is_read(block, readers):
                self._region.restore(self._section, block)
                self._blocks.move_to_end(key)
            else:
                self._region.forget(self._section, block)
                del self._blocks[key]
                self._free.append(block)

    def discard(self) -> None:
        """Give the memory of all free blocks back."""
        free = sorted(self._free)
        first = 0
        for at, block in enumerate(free, 1):
            if at == len(free) or free[at] != block + 1:
                self._region.give_memory_back(self._section, free[first], at - first)
                first = at

    def reserve(self, key: bytes) -> int | None:
        """Return a free block to write for a key; None: the key has a block, or none is free."""
        if key in self._blocks or not self._free:
            return None
        block = self._free.pop()
        self._pending[block] = key
        return block

    @property
    def num_free(self) -> int:
        """The number of free blocks."""
        return len(self._free)

    def reserved_key(self, block: int) -> bytes:
        """The key of a reserved block."""
        return self._pending[block]

    @property
    def num_reserved(self) -> int:
        """The number of blocks that are being written."""
        return len(self._pending)

    def publish(self, block: int) -> bool:
        """Let others read a reserved block, which has been written. Returns whether they can: not
        if the key has got a block meanwhile, or the index has no room."""
        key = self._pending.pop(block)
        if key not in self._blocks and self._region.publish(self._section, block, key):
            self._blocks[key] = block
            return True
        self._free.append(block)
        return False

    def cancel(self, block: int) -> None:
        """Free a reserved block."""
        del self._pending[block]
        self._free.append(block)

    def _is_read(self, block: int, readers: Sequence[Region]) -> bool:
        if block in self._own_readers:
            return True
        place = self._region.place
        return any(reader.pins(place, self._section, block) for reader in readers)
