"""Steps that are like the one before: the same requests, each with one more token.

Most steps are that, and there is little to decide about each request: every sixteenth step
or so it needs a block, and its end can be foreseen. So such steps are planned and applied as
columns. Owns when that holds and what then differs from step to step. Must not know who else
wants to run; the scheduler drops a run as soon as anybody enters or leaves.

Where steps overlap, each request has a token under way whenever a step is planned, and what a
block holds is known a step after it was planned to be full. Otherwise none has.
"""

from __future__ import annotations

from collections.abc import Sequence

from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.plan import StepPlan
from shmllm.core.request import Request
from shmllm.outputs.columns import FinishReason, OutputColumns


class SteadyDecode:
    """
    Args:
        requests: all that run, in their order; each one `is_only_decoding`, and either all or
            none of them have a token under way.
        kv_cache: has their blocks.

    Attributes:
        num_steps: planned so far.
    """

    def __init__(self, requests: Sequence[Request], kv_cache: KVCacheManager) -> None:
        self._requests = list(requests)
        self._kv_cache = kv_cache
        self._rows = [request.row for request in requests]
        self.num_steps = 0
        self._num_applied = 0
        self._num_under_way = requests[0].num_under_way
        self._most = min(request.num_tokens_left for request in requests) - self._num_under_way
        self._stop_ids = frozenset[int]().union(*(request.stop_ids for request in requests))
        # By how many tokens the last block has, so that those at its edge need no search.
        self._by_phase: list[list[Request]] = [[] for _ in range(kv_cache.block_size)]
        self._places: dict[int, list[int]] = {}
        for place, request in enumerate(requests):
            self._by_phase[request.num_computed_tokens % kv_cache.block_size].append(request)
            self._places.setdefault(request.client, []).append(place)
        self._numbers = {
            client: [requests[place].number for place in places]
            for client, places in self._places.items()
        }

    def plan(self, plan: StepPlan) -> bool:
        """Plan one token of each. False, and nothing changed, if there are too few blocks, or if
        one of them ends with the token under way."""
        kv_cache, requests, count = self._kv_cache, self._requests, len(self._requests)
        entering = self._by_phase[-self.num_steps % kv_cache.block_size]
        filling = self._by_phase[(self._num_under_way - self.num_steps - 1) % kv_cache.block_size]
        if self.num_steps == self._most or len(entering) > kv_cache.pool.num_free:
            return False
        for request in entering:
            plan.append_blocks(request, kv_cache.extend(request, request.num_computed_tokens + 1))
        plan.starts = [request.num_computed_tokens for request in requests]
        for request in requests:
            request.num_computed_tokens += 1
        for request in filling:
            kv_cache.register_full_blocks(request)
        plan.requests = requests.copy()
        plan.rows = self._rows.copy()
        plan.counts = [1] * count
        plan.samples = list(range(count))
        plan.num_tokens = count
        plan.run = self
        self.num_steps += 1
        return True

    def apply(self, step: int, token_ids: Sequence[int]) -> dict[int, OutputColumns] | None:
        """Give each request its token. None, and no token taken, if one of them may end with
        it: then each has to be looked at."""
        self._num_applied += 1
        if self._num_applied == self._most or not self._stop_ids.isdisjoint(token_ids):
            return None
        for request, token_id in zip(self._requests, token_ids, strict=True):
            request.token_ids.append(token_id)
        return {
            client: OutputColumns(
                step,
                numbers=self._numbers[client].copy(),
                counts=[1] * len(places),
                finishes=[FinishReason.NONE] * len(places),
                token_ids=[token_ids[place] for place in places],
            )
            for client, places in self._places.items()
        }
