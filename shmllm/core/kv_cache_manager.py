"""Allocates and frees the KV blocks of requests, and finds their prefix-cache hits.

This module owns the block pool and the prefix cache. A running request has a block table for each
group of layers. All its tables have the same length, which only grows; blocks that the layers of a
group no longer read go back to the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shmllm.core.block_pool import BlockPool, KVBlock
from shmllm.core.block_table import BlockTable
from shmllm.core.kv_groups import ONE_GROUP, KVGroup
from shmllm.core.prefix_cache import PrefixCache, extend_block_hashes
from shmllm.core.request import Request

NO_MORE_BLOCKS = 2**62
"""A value of `Request.num_cached_blocks` that no number of full blocks exceeds."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached blocks of a request's longest known prefix.

    Attributes:
        num_blocks: the length of the prefix, in blocks.
        tables: the block table of each group, with the blocks that its layers still read.
    """

    num_blocks: int
    tables: list[BlockTable]


class KVCacheManager:
    """
    Args:
        num_blocks: the number of blocks, including the padding block.
        block_size: the number of tokens in a block.
        enable_prefix_caching: whether requests reuse the blocks of equal prefixes.
        groups: the groups of layers.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        groups: Sequence[KVGroup] = ONE_GROUP,
    ) -> None:
        self.block_size = block_size
        self.num_groups = len(groups)
        self.enable_prefix_caching = enable_prefix_caching
        self._rules = [group.rule for group in groups]
        self._has_passed_blocks = any(rule.most_kept is not None for rule in self._rules)
        self.prefix_cache = PrefixCache(self._rules, block_size)
        self.pool = BlockPool(num_blocks, on_reuse=self.prefix_cache.forget)

    @property
    def num_used_blocks(self) -> int:
        return self.pool.num_usable - self.pool.num_free

    def longest_hit(self, request: Request) -> PrefixHit:
        """The cached blocks of the request's longest known prefix. The prefix excludes the
        request's last token, which must be computed because its logits choose the next token."""
        length = 0
        if self.enable_prefix_caching and request.params.reads_prefix_cache:
            extend_block_hashes(
                request.block_hashes, request.token_ids, self.block_size, request.cache_salt
            )
            most = (request.num_tokens - 1) // self.block_size
            length = self.prefix_cache.longest_hit(request.block_hashes, most)
        tables = [BlockTable() for _ in self._rules]
        for group, table in enumerate(tables):
            if length:
                first, kept = self.prefix_cache.blocks(group, request.block_hashes, length)
                table.blocks = [self.pool.padding] * first + kept
                table.first_kept = first
        return PrefixHit(length, tables)

    def admit(self, request: Request, hit: PrefixHit, num_tokens: int) -> bool:
        """Give a request that has no blocks the blocks for its first `num_tokens` tokens.

        Args:
            request: the request.
            hit: the result of `longest_hit`.
            num_tokens: the number of tokens, including those of the hit.

        Returns:
            False, without any change, if there are too few free blocks.
        """
        assert not request.block_tables
        num_new = -(-num_tokens // self.block_size) - hit.num_blocks
        kept = [block for table in hit.tables for block in table.kept]
        num_hit_in_queue = sum(block.ref_count == 0 for block in kept)
        if num_new * self.num_groups > self.pool.num_free - num_hit_in_queue:
            return False
        self.pool.touch(kept)  # of all groups, before `allocate` could reuse a free one
        request.block_tables = hit.tables
        for table in hit.tables:
            table.blocks += self.pool.allocate(num_new)
        request.num_cached_blocks = hit.num_blocks
        return True

    def extend(self, request: Request, num_tokens: int) -> list[list[KVBlock]] | None:
        """Append the blocks that the request's first `num_tokens` tokens still need, after freeing
        those that no token from `num_computed_tokens` on reads.

        Steps run in the order in which they are planned. A freed block may therefore be written in
        the step that is being planned, or later, and read before that.

        Returns:
            The appended blocks of each group, as many for each; [] if none are needed; None,
            without appending any, if there are too few free blocks.
        """
        if self._has_passed_blocks:
            self._release_passed(request)
        tables = request.block_tables
        num_new = -(-num_tokens // self.block_size) - len(tables[0].blocks)
        if num_new <= 0:
            return []
        if num_new * len(tables) > self.pool.num_free:
            return None
        appended = [self.pool.allocate(num_new) for _ in tables]
        for table, blocks in zip(tables, appended, strict=True):
            table.blocks += blocks
        return appended

    def _release_passed(self, request: Request) -> None:
        for rule, table in zip(self._rules, request.block_tables, strict=True):
            first = rule.first_kept(request.num_computed_tokens) // self.block_size
            if first > table.first_kept:
                passed = slice(table.first_kept, min(first, len(table.blocks)))
                self.pool.release(table.blocks[passed])
                table.blocks[passed] = [self.pool.padding] * (passed.stop - passed.start)
                table.first_kept = passed.stop

    def register_full_blocks(self, request: Request) -> None:
        """Add the request's full blocks to the prefix cache.

        A block counts as full as soon as a step that computes its last token is planned. Requests
        that are planned later may read the block in a later step or in the same step, because
        each layer writes all keys and values before it reads any. A block is not registered
        before its last token is known, because the block's hash depends on that token.
        """
        if not self.enable_prefix_caching:
            return
        if request.num_computed_tokens // self.block_size <= request.num_cached_blocks:
            return
        num_full = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        extend_block_hashes(
            request.block_hashes, request.token_ids, self.block_size, request.cache_salt
        )
        for group, table in enumerate(request.block_tables):
            for index in range(max(request.num_cached_blocks, table.first_kept), num_full):
                block_hash = request.block_hashes[index]
                self.prefix_cache.register(table.blocks[index], block_hash, group)
        request.num_cached_blocks = num_full

    def release(self, request: Request) -> None:
        """Free all blocks of the request. The last block is reused first, so a prefix stays
        cached longer than its continuations."""
        tables = request.block_tables
        self.pool.release(
            table.blocks[index]
            for index in reversed(range(len(tables[0].blocks)))
            for table in tables
            if index >= table.first_kept
        )
        request.block_tables = []
        request.num_cached_blocks = 0

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache. Running requests keep their blocks."""
        self.prefix_cache.clear()

    def stop_registering(self, request: Request) -> None:
        """Add no more blocks of this request to the prefix cache, until it is preempted."""
        request.num_cached_blocks = NO_MORE_BLOCKS

    def check_integrity(self) -> None:
        """Raise AssertionError if the pool and the prefix cache are inconsistent."""
        self.pool.check_integrity()
        hashed = sum(block.block_hash is not None for block in self.pool.blocks)
        assert hashed == len(self.prefix_cache), "a cached block and the tables disagree"
