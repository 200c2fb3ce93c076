"""Gives requests their blocks: prefix hits, new blocks, and back.

Owns the pool and the prefix cache together. A request's block list only grows while it
runs; position p of the request lives in block p // block_size of that list.
"""

from __future__ import annotations

from shmllm.core.block_pool import BlockPool, KVBlock
from shmllm.core.prefix_cache import PrefixCache, extend_block_hashes
from shmllm.core.request import Request

NEVER = 2**62
"""More blocks than a request can have."""


class KVCacheManager:
    """
    Args:
        num_blocks: blocks in the cache, the padding block included.
        block_size: tokens per block.
        enable_prefix_caching: False computes every token of every request.
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
        """Cached blocks of the request's prefix. The last token is never among them: it
        has to be computed, since its logits choose the next one."""
        if not self.enable_prefix_caching or not request.params.reads_prefix_cache:
            return []
        extend_block_hashes(
            request.block_hashes, request.token_ids, self.block_size, request.cache_salt
        )
        most = (request.num_tokens - 1) // self.block_size
        return self.prefix_cache.longest_hit(request.block_hashes, most)

    def admit(self, request: Request, hit: list[KVBlock], num_tokens: int) -> bool:
        """Give a request without blocks its `hit` and room for its first `num_tokens` tokens.

        False, and nothing changed, if there are not enough free blocks.
        """
        assert not request.blocks
        num_new = -(-num_tokens // self.block_size) - len(hit)
        num_hit_in_queue = sum(block.ref_count == 0 for block in hit)
        if num_new > self.pool.num_free - num_hit_in_queue:
            return False
        self.pool.touch(hit)  # first: a hit that is still in the free queue must not be reused
        request.blocks = hit + self.pool.allocate(num_new)
        request.num_cached_blocks = len(hit)
        return True

    def extend(self, request: Request, num_tokens: int) -> list[KVBlock] | None:
        """Room for the request's first `num_tokens` tokens: the blocks appended, perhaps
        none; None, and nothing changed, if there are not enough free blocks."""
        num_new = -(-num_tokens // self.block_size) - len(request.blocks)
        if num_new <= 0:
            return []
        if num_new > self.pool.num_free:
            return None
        appended = self.pool.allocate(num_new)
        request.blocks += appended
        return appended

    def register_full_blocks(self, request: Request) -> None:
        """Make the request's computed full blocks findable.

        Called when a step is planned, before it ran: a request planned later reads them in
        a later step, or in the same one, where every layer writes all keys and values
        before it reads any. A block whose last token is not known yet waits until it is.
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
        """Take all blocks back, deepest first: a prefix outlives what continues it."""
        self.pool.release(reversed(request.blocks))
        request.blocks = []
        request.num_cached_blocks = 0

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. Blocks in use stay with their requests."""
        self.prefix_cache.clear()

    def stop_registering(self, request: Request) -> None:
        """Make no more blocks of this request findable, until it has been preempted."""
        request.num_cached_blocks = NEVER

    def check_integrity(self) -> None:
        """Raise AssertionError if pool and table contradict each other."""
        self.pool.check_integrity()
        hashed = sum(block.block_hash is not None for block in self.pool.blocks)
        assert hashed == len(self.prefix_cache), "a cached block and the table disagree"
