"""The prefix cache: hashes of full KV blocks, and the tables from hash to block.

The hash of a block covers the hash of its parent block and its own token ids. Equal hashes
therefore mean that all tokens from the first one on, and the cache salt, are equal; requests with
different salts share no block. Where a block has embeddings of an image, its hash also covers the
image's identity, and which of them are where. This module must not know which blocks are free.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256
from struct import Struct

from shmllm.core.block_pool import KVBlock
from shmllm.core.kv_groups import KVRule
from shmllm.core.request import Request
from shmllm.core.shared_blocks import Lender
from shmllm.params.items import Item, items_between

BEHIND = b"behind"
PLACE = Struct("<QQQ")
"""Where embeddings of an image lie: the first and the last position, and the index of the first."""


def _root_hash(cache_salt: str) -> bytes:
    """The hash that stands for the parent of every request's first block."""
    return sha256(b"shmllm prefix\0" + cache_salt.encode()).digest()


def extend_block_hashes(
    hashes: list[bytes],
    token_ids: array[int],
    block_size: int,
    cache_salt: str,
    items: Sequence[Item] = (),
) -> None:
    """Append to `hashes` the missing hashes of the full blocks of `token_ids`."""
    num_full = len(token_ids) // block_size
    if len(hashes) >= num_full:
        return
    parent = hashes[-1] if hashes else _root_hash(cache_salt)
    for index in range(len(hashes), num_full):
        block_ids = token_ids[index * block_size : (index + 1) * block_size]
        parent = sha256(parent + block_ids.tobytes() + _of_items(items, index, block_size)).digest()
        hashes.append(parent)


def _of_items(items: Sequence[Item], index: int, block_size: int) -> bytes:
    """What the images with tokens in a block add to what its hash covers; nothing without any. That
    one begins right behind a block counts, too: the token before it may have a place of its own."""
    found = b""
    begin, end = index * block_size, (index + 1) * block_size
    for item in items_between(items, begin, end + 1):
        num_before = 0
        if item.start == end:
            found += BEHIND
        for first, last in item.spans:
            if first < end and begin < last:
                place = max(first, begin), min(last, end)
                found += item.identity + PLACE.pack(*place, num_before + place[0] - first)
            num_before += last - first
    return found


def hash_blocks(request: Request, block_size: int) -> None:
    """Append the missing hashes of a request's full blocks to its `block_hashes`."""
    extend_block_hashes(
        request.block_hashes, request.token_ids, block_size, request.cache_salt, request.items
    )


class BlockObserver:
    """Is told which blocks the prefix cache has. This one does nothing."""

    def registered(self, block: KVBlock, block_hash: bytes) -> None:
        """A block was added. Its contents are complete when the step that is being planned, or else
        the last one, has run."""

    def forgotten(self, block: KVBlock) -> None:
        """A block was removed; the step that is being planned may overwrite it."""

    def cleared(self) -> None:
        """All blocks were removed."""


class PrefixCache:
    """The tables from block hash to block, one for each group of layers.

    If two requests compute the same prefix at the same time, each fills its own blocks. The table
    keeps the block that was registered first.

    A block of states has as many tokens as several other blocks; its hash is that of the last of
    them. Lengths of prefixes are numbers of blocks of `block_size` tokens.

    Args:
        rules: what the layers of each group keep.
        block_size: the number of tokens in a block of keys and values.

    Attributes:
        lender: has further blocks, which other engines share; None: there are none.
        observer: see `BlockObserver`.
    """

    def __init__(self, rules: Sequence[KVRule], block_size: int) -> None:
        self.lender: Lender | None = None
        self.observer = BlockObserver()
        self._rules = rules
        self._sizes = [rule.interval or block_size for rule in rules]
        self._ratios = [size // block_size for size in self._sizes]
        self._blocks: list[dict[bytes, KVBlock]] = [{} for _ in rules]

    def __len__(self) -> int:
        return sum(map(len, self._blocks))

    def longest_hit(self, hashes: Sequence[bytes], most: int) -> int:
        """The number of blocks of the longest prefix, at most `most`, of which every group has all
        blocks that its layers still read behind it.

        Each group shortens the prefix until all agree. This finds the longest one: a group never
        passes over a prefix for which it has the blocks.
        """
        length, agreed, group = min(most, len(hashes)), 0, 0
        while agreed < len(self._rules) and length:
            shorter = self._longest_in(group, hashes, length)
            agreed = agreed + 1 if shorter == length else 1
            length = shorter
            group = (group + 1) % len(self._rules)
        return length

    def blocks(
        self, group: int, hashes: Sequence[bytes], length: int
    ) -> tuple[int, list[KVBlock | None]]:
        """The blocks of one group for a prefix that `longest_hit` found. Those that other engines
        share are borrowed.

        Returns:
            The index of the first block that the group's layers still read, and the blocks from
            there to the end of the prefix; None for a block that its engine has reused since.
        """
        count = length // self._ratios[group]
        first = self._first_kept(group, count)
        wanted = self._own(group, hashes)[first:count]
        return first, [self._block(group, each) for each in wanted]

    def _block(self, group: int, block_hash: bytes) -> KVBlock | None:
        block = self._blocks[group].get(block_hash)
        if block is None and self.lender is not None:
            return self.lender.borrow(group, block_hash)
        return block

    def _own(self, group: int, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """The hashes of a group's blocks."""
        ratio = self._ratios[group]
        return hashes if ratio == 1 else hashes[ratio - 1 :: ratio]

    def _first_kept(self, group: int, count: int) -> int:
        """The index of the first of a group's blocks that is read behind `count` of them."""
        return self._rules[group].first_kept(count * self._sizes[group]) // self._sizes[group]

    def _longest_in(self, group: int, hashes: Sequence[bytes], most: int) -> int:
        table, ratio, own = self._blocks[group], self._ratios[group], self._own(group, hashes)
        count = index = most // ratio
        if self._rules[group].most_kept is None:
            absent = (
                at
                for at in range(count)
                if own[at] not in table and not self._is_lent(group, own[at])
            )
            return next(absent, count)
        while index > self._first_kept(group, count):
            index -= 1
            if own[index] not in table and not self._is_lent(group, own[index]):
                count = index  # every longer prefix up to here reads this block, too
        return count * ratio

    def _is_lent(self, group: int, block_hash: bytes) -> bool:
        return self.lender is not None and self.lender.has(group, block_hash)

    def share(self, lender: Lender | None) -> None:
        """Use a lender's blocks from now on, and offer it all that the cache has; None: use none
        any more."""
        self.lender = lender
        if lender is not None:
            for group, table in enumerate(self._blocks):
                for block_hash, block in table.items():
                    lender.offer_cached(block, group, block_hash)

    def register(self, block: KVBlock, block_hash: bytes, group: int) -> None:
        """Add a block, unless the cache has one of this hash, or it is borrowed."""
        table = self._blocks[group]
        if block_hash not in table and block.block_hash is None:
            block.block_hash, block.group = block_hash, group
            table[block_hash] = block
            self.observer.registered(block, block_hash)
            if self.lender is not None:
                self.lender.offer(block, group, block_hash)

    def forget(self, block: KVBlock) -> None:
        """Remove a block, because its contents will be overwritten."""
        assert block.block_hash is not None
        del self._blocks[block.group][block.block_hash]
        block.block_hash = None
        self.observer.forgotten(block)
        if self.lender is not None:
            self.lender.withdraw(block)

    def clear(self) -> None:
        self.observer.cleared()
        if self.lender is not None:
            self.lender.forget()
        for table in self._blocks:
            for block in table.values():
                block.block_hash = None
            table.clear()
