"""The pool of KV blocks: reference counts, and the order in which free blocks are reused.

A free block keeps its hash, and so its cached prefix, until the pool allocates it again. This
module must not know the contents of blocks or how prefix-cache hits are found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

PADDING_BLOCK_ID = 0
"""The block that pads block tables. It is never allocated."""


class Home(Protocol):
    """Where a block is while nobody refers to it."""

    def append(self, block: KVBlock) -> None:
        """The last reference was dropped."""

    def remove(self, block: KVBlock) -> None:
        """The first reference is being added."""


class KVBlock:
    """One KV block. `previous` and `following` belong to FreeBlockQueue, `block_hash` and `group`
    to PrefixCache.

    Attributes:
        home: where it is while nobody refers to it; None: it has no contents.
    """

    __slots__ = ("block_hash", "block_id", "following", "group", "home", "previous", "ref_count")

    def __init__(self, block_id: int, home: Home | None = None) -> None:
        self.block_id = block_id
        self.home = home
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.group = 0
        self.previous: KVBlock | None = None
        self.following: KVBlock | None = None

    def __repr__(self) -> str:
        return f"KVBlock({self.block_id}, ref_count={self.ref_count})"


class FreeBlockQueue:
    """The free blocks in the order of reuse, as a linked list.

    The links are in the blocks, because a prefix-cache hit removes a block from the middle: that
    takes constant time and allocates nothing. Blocks that nobody has used have no objects, which
    would take a second for a million of them: one link stands for all.

    Args:
        num_unused: how many blocks nobody has used.
        make: makes the object of the next one.

    Attributes:
        num_unused: how many there are still.
    """

    def __init__(self, num_unused: int, make: Callable[[], KVBlock]) -> None:
        self.num_unused = num_unused
        self._make = make
        self._head, self._unused, self._tail = KVBlock(-1), KVBlock(-1), KVBlock(-1)
        self._unused.previous, self._unused.following = self._head, self._tail
        self._head.following = self._tail.previous = self._unused
        self._count = num_unused

    def __len__(self) -> int:
        return self._count

    def append(self, block: KVBlock) -> None:
        self._insert(block, self._tail)

    def append_first(self, block: KVBlock) -> None:
        following = self._head.following
        assert following is not None
        self._insert(block, following)

    def _insert(self, block: KVBlock, following: KVBlock) -> None:
        before = following.previous
        assert before is not None
        before.following, block.previous = block, before
        block.following, following.previous = following, block
        self._count += 1

    def pop_first(self) -> KVBlock:
        block = self._head.following
        if block is self._unused:
            if self.num_unused:
                self.num_unused -= 1
                self._count -= 1
                return self._make()
            block = block.following
        assert block is not None
        if block is self._tail:
            raise IndexError("no free block")
        self.remove(block)
        return block

    def remove(self, block: KVBlock) -> None:
        before, after = block.previous, block.following
        assert before is not None, f"{block} is not in the queue"
        assert after is not None, f"{block} is not in the queue"
        before.following, after.previous = after, before
        block.previous = block.following = None
        self._count -= 1

    def __iter__(self) -> Iterator[KVBlock]:
        """The blocks that somebody has used."""
        block = self._head.following
        while block is not None and block is not self._tail:
            if block is not self._unused:
                yield block
            block = block.following


class BlockPool:
    """All blocks of the KV cache.

    Args:
        num_blocks: the number of blocks, including the padding block.
        on_reuse: called with a block that still has a hash, before the block is allocated.

    Attributes:
        num_usable: the number of blocks without the padding block.
        blocks: the blocks that somebody has used, by their ids; the first is the padding block.
    """

    def __init__(self, num_blocks: int, on_reuse: Callable[[KVBlock], None]) -> None:
        self.num_usable = num_blocks - 1
        self._free = FreeBlockQueue(self.num_usable, self._make)
        self.blocks = [KVBlock(PADDING_BLOCK_ID, self._free)]
        self._on_reuse = on_reuse

    def _make(self) -> KVBlock:
        block = KVBlock(len(self.blocks), self._free)
        self.blocks.append(block)
        return block

    @property
    def padding(self) -> KVBlock:
        """The block that takes the places of blocks that nobody reads."""
        return self.blocks[PADDING_BLOCK_ID]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[KVBlock]:
        """Allocate the `count` least recently used free blocks.

        Raises:
            IndexError: there are fewer free blocks; the caller has to check `num_free` first.
        """
        allocated = []
        for _ in range(count):
            block = self._free.pop_first()
            if block.block_hash is not None:
                self._on_reuse(block)
            block.ref_count = 1
            allocated.append(block)
        return allocated

    def touch(self, blocks: Iterable[KVBlock]) -> None:
        """Add a reference to each block. Free blocks leave the free queue; borrowed ones may be
        among the blocks."""
        for block in blocks:
            if block.ref_count == 0 and block.home is not None:
                block.home.remove(block)
            block.ref_count += 1

    def count_free(self, blocks: Iterable[KVBlock]) -> int:
        """The number of blocks that are free blocks of this pool."""
        return sum(block.ref_count == 0 and block.home is self._free for block in blocks)

    def release(self, blocks: Iterable[KVBlock]) -> None:
        """Drop a reference of each block. Of the blocks with a hash that become free, the first in
        the given order is reused first. One without a hash is of no use to others: it is reused
        before all that are free, while its memory is still in the processor's caches."""
        for block in blocks:
            block.ref_count -= 1
            if block.ref_count or block.home is None:
                continue
            if block.block_hash is None and block.home is self._free:
                self._free.append_first(block)
            else:
                block.home.append(block)

    def discard(self, block: KVBlock) -> None:
        """Drop the only reference of a block that has no hash: it is reused before all others."""
        assert block.ref_count == 1
        assert block.block_hash is None
        block.ref_count = 0
        self._free.append_first(block)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is either free or referenced."""
        num_unused = self._free.num_unused
        assert len(self.blocks) + num_unused == self.num_usable + 1, "a block is missing"
        free = {block.block_id for block in self._free}
        assert len(free) + num_unused == len(self._free), "a block is queued twice"
        assert PADDING_BLOCK_ID not in free, "the padding block is queued"
        for block in self.blocks[1:]:
            assert block.ref_count >= 0, f"{block} has a negative count"
            assert (block.ref_count == 0) == (block.block_id in free), f"{block} is misplaced"
