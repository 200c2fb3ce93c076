"""Allocates and frees the KV blocks of requests, and finds their prefix-cache hits.

This module owns the block pool and the prefix cache. The block list of a running request only
grows. The keys and values of position p are in block p // block_size of that list.
"""

from __future__ import annotations

from shmllm.core.block_pool import BlockPool, KVBlock
from shmllm.core.prefix_cache import PrefixCache, extend_block_hashes
from shmllm.core.request import Request

NO_MORE_BLOCKS = 2**62
"""A value of `Request.num_cached_blocks` that no number of full blocks exceeds."""


class KVCacheManager:
    """
    Args:
        num_blocks: the number of blocks, including the padding block.
        block_size: the number of tokens in a block.
        enable_prefix_caching: whether requests reuse the blocks of equal prefixes.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_cache = PrefixCache()
        self.pool = BlockPool(num_blocks, on_reuse=self.prefix_cache.forget)

    @property
    def num_used_blocks(self) -> int:
        return self.pool.num_usable - self.pool.num_free

    def longest_hit(self, request: Request) -> list[KVBlock]:
        """The cached blocks of the request's longest known prefix. The prefix excludes the
        request's last token, which must be computed because its logits choose the next token."""
        if not self.enable_prefix_caching or not request.params.reads_prefix_cache:
            return []
        extend_block_hashes(
            request.block_hashes, request.token_ids, self.block_size, request.cache_salt
        )
        max_blocks = (request.num_tokens - 1) // self.block_size
        return self.prefix_cache.longest_hit(request.block_hashes, max_blocks)

    def admit(self, request: Request, hit: list[KVBlock], num_tokens: int) -> bool:
        """Give a request that has no blocks the blocks for its first `num_tokens` tokens.

        Args:
            request: the request.
            hit: the result of `longest_hit`.
            num_tokens: the number of tokens, including those of the hit.

        Returns:
            False, without any change, if there are too few free blocks.
        """
        assert not request.blocks
        num_new = -(-num_tokens // self.block_size) - len(hit)
        num_hit_in_queue = sum(block.ref_count == 0 for block in hit)
        if num_new > self.pool.num_free - num_hit_in_queue:
            return False
        self.pool.touch(hit)  # before `allocate`, which could reuse the free blocks of the hit
        request.blocks = hit + self.pool.allocate(num_new)
        request.num_cached_blocks = len(hit)
        return True

    def extend(self, request: Request, num_tokens: int) -> list[KVBlock] | None:
        """Append the blocks that the request's first `num_tokens` tokens still need.

        Returns:
            The appended blocks; None, without any change, if there are too few free blocks.
        """
        num_new = -(-num_tokens // self.block_size) - len(request.blocks)
        if num_new <= 0:
            return []
        if num_new > self.pool.num_free:
            return None
        appended = self.pool.allocate(num_new)
        request.blocks += appended
        return appended

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
        for index in range(request.num_cached_blocks, num_full):
            self.prefix_cache.register(request.blocks[index], request.block_hashes[index])
        request.num_cached_blocks = num_full

    def release(self, request: Request) -> None:
        """Free all blocks of the request. The last block is reused first, so a prefix stays
        cached longer than its continuations."""
        self.pool.release(reversed(request.blocks))
        request.blocks = []
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
        assert hashed == len(self.prefix_cache), "a cached block and the table disagree"
