"""The blocks of one request in one group of layers, by position."""

from __future__ import annotations

from shmllm.core.block_pool import KVBlock


class BlockTable:
    """A request's blocks. The keys and values of position p are in `blocks[p // block_size]`.

    Attributes:
        blocks: the request's blocks. It only grows; the padding block takes the places of blocks
            that the layers no longer read, or never do.
        first_kept: the index of the first block that the request still has.
        unread: the indices, behind that, of blocks that no layer ever reads.
    """

    __slots__ = ("blocks", "first_kept", "unread")

    def __init__(self) -> None:
        self.blocks: list[KVBlock] = []
        self.first_kept = 0
        self.unread = range(0)

    @property
    def kept(self) -> list[KVBlock]:
        """The blocks that the request still has."""
        if not self.unread:
            return self.blocks[self.first_kept :]
        return [self.blocks[index] for index in range(len(self.blocks)) if self.has(index)]

    def has(self, index: int) -> bool:
        """Whether the request still has a block of its own at this index."""
        return self.first_kept <= index < len(self.blocks) and index not in self.unread

    def leave_out(self, unread: range, padding: KVBlock) -> None:
        """Put the padding block at indices that no layer reads, before the blocks that are there
        now."""
        self.blocks[unread.start : unread.start] = [padding] * len(unread)
        self.unread = unread

    @property
    def block_ids(self) -> list[int]:
        return [block.block_id for block in self.blocks]
