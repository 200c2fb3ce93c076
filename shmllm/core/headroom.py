"""Headroom: the blocks that stay free when a waiting request is admitted beside running ones.

A request that takes the last free blocks makes others give way as soon as they need one more, and
what these had computed is computed again. So there must be room for its whole prompt, and for the
prompts and the next tokens of those that run. This module must not know how blocks are allocated.
"""

from __future__ import annotations

from collections.abc import Sequence

from shmllm.config.engine import SchedulerConfig
from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.request import Request

GROWTH_TOKENS = 32
"""For how many tokens behind its known ones each request must have room, as
`tools/bench_preemption.py` compares: with fewer, more tokens are computed again; with more, fewer
requests run."""


class Headroom:
    """
    Args:
        config: has `watermark` and `scheduler_reserve_full_isl`.
        kv_cache: has the blocks.
        longest_chunk: the most tokens of a prompt in a step.

    Attributes:
        watermark: the number of blocks that stay free besides.
    """

    def __init__(
        self, config: SchedulerConfig, kv_cache: KVCacheManager, longest_chunk: int
    ) -> None:
        self._longest_chunk = longest_chunk
        self._kv_cache = kv_cache
        self._is_on = config.scheduler_reserve_full_isl
        self.watermark = int(config.watermark * kv_cache.pool.num_usable)

    def of_running(self, requests: Sequence[Request]) -> int:
        """Returns the number of blocks that running requests have to get soon."""
        num_tokens = self._kv_cache.num_allocated_tokens
        return sum(self.of_request(request, num_tokens(request)) for request in requests)

    def of_request(self, request: Request, num_tokens: int) -> int:
        """Returns the number of blocks that a request has to get soon when it has those of its
        first `num_tokens` tokens."""
        if not self._is_on:
            return 0
        # Nobody computes the keys and values of the last token.
        growth = 0 if request.pooling else min(request.num_tokens_left - 1, GROWTH_TOKENS)
        chunk = min(max(request.num_tokens - num_tokens, 1), self._longest_chunk)
        return self._kv_cache.num_growing(num_tokens, request.num_tokens + growth, chunk)
