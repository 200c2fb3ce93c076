"""Headroom: the blocks that stay free when a waiting request is admitted beside running ones.

A request that takes the last free blocks makes others give way as soon as they need one more, and
what these had computed is computed again. So there must be room for its whole prompt, and for the
prompts and the next tokens of those that run. Two kinds of running requests do not count: those of
a front end that is paused, which get no tokens, and under the policy "priority" those that give way
to the request. This module must not know how blocks are allocated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence

from shmllm.config.engine import SchedulerConfig
from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.priority_queue import sort_key
from shmllm.core.request import Request

GROWTH_TOKENS = 32
"""For how many tokens behind its known ones each request must have room, as
`tools/bench_preemption.py` compares: with fewer, more tokens are computed again; with more, fewer
requests run."""


class Headroom:
    """
    Args:
        config: has `watermark`, `scheduler_reserve_full_isl` and the policy.
        kv_cache: has the blocks.
        longest_chunk: the most tokens of a prompt in a step.
    """

    def __init__(
        self, config: SchedulerConfig, kv_cache: KVCacheManager, longest_chunk: int
    ) -> None:
        self._kv_cache = kv_cache
        self._longest_chunk = longest_chunk
        self._is_on = config.scheduler_reserve_full_isl
        self._is_by_priority = config.policy == "priority"
        self._watermark = int(config.watermark * kv_cache.pool.num_usable)
        self.begin()

    def begin(self) -> None:
        """Begin with the admissions of a step."""
        self._num_counted = self._num_beside = self._reserved = 0

    def spare(
        self,
        request: Request,
        num_tokens: int,
        running: Sequence[Request],
        paused: Container[int],
    ) -> int:
        """Returns how many blocks have to stay free when a request gets those of its first
        `num_tokens` tokens: none if it is alone.

        Args:
            request: the request.
            num_tokens: the number of tokens.
            running: the running requests in their order. Since the call of `begin`, it has got
                those that were admitted, and has lost none.
            paused: the front ends whose requests get no tokens.
        """
        end = len(running)
        if self._is_by_priority:
            self.begin()
            end = bisect_left(running, sort_key(request), key=sort_key)
        for each in running[self._num_counted : end]:
            if each.client not in paused:
                self._num_beside += 1
                self._reserved += self._growth(each, self._kv_cache.num_allocated_tokens(each))
        self._num_counted = end
        if not self._num_beside:
            return 0
        return self._reserved + self._growth(request, num_tokens) + self._watermark

    def _growth(self, request: Request, num_tokens: int) -> int:
        """The number of blocks that a request has to get soon when it has those of its first
        `num_tokens` tokens."""
        if not self._is_on:
            return 0
        # Nobody computes the keys and values of the last token.
        growth = 0 if request.pooling else min(request.num_tokens_left - 1, GROWTH_TOKENS)
        chunk = min(max(request.num_tokens - num_tokens, 1), self._longest_chunk)
        return self._kv_cache.num_growing(num_tokens, request.num_tokens + growth, chunk)
