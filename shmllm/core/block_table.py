"""The blocks of one request in one group of layers, by position."""

from __future__ import annotations

from shmllm.core.block_pool import KVBlock


class BlockTable:
    """A request's blocks. The keys and values of position p are in `blocks[p // block_size]`.

    Attributes:
        blocks: the request's blocks. It only grows; the padding block takes the places of blocks
            that the layers no longer read.
        first_kept: the index of the first block that the request still has.
    """

    __slots__ = ("blocks", "first_kept")

    def __init__(self) -> None:
        self.blocks: list[KVBlock] = []
        self.first_kept = 0

    @property
    def kept(self) -> list[KVBlock]:
        """The blocks that the request still has."""
        return self.blocks[self.first_kept :]

    @property
    def block_ids(self) -> list[int]:
        return [block.block_id for block in self.blocks]
