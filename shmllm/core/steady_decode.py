"""Plans and applies unchanged steps: the same requests as before, each with one more token.

Most steps are unchanged, and an unchanged step needs few decisions: a request needs a block once in
`block_size` steps, and the step in which it ends by its length is known in advance. Unchanged steps
are therefore planned and applied as whole columns. This module owns the conditions under
which that is possible. It must not know about waiting requests: the scheduler drops a SteadyDecode
as soon as a request enters or leaves.

If steps overlap, every request has a token in flight whenever a step is planned, and the content of
a block is known one step after the step that fills it was planned. If steps do not overlap, no
request has a token in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.plan import StepPlan, StepResult
from shmllm.core.request import Request
from shmllm.outputs.columns import FinishReason, OutputColumns

STEADY_AFTER_STEPS = 4
"""How many unchanged steps pass before a SteadyDecode is tried."""


class SteadySteps:
    """Plans and applies steps by a SteadyDecode while that is possible.

    Args:
        kv_cache: allocates the requests' blocks.
    """

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self._decode: SteadyDecode | None = None
        self._num_unchanged = 0

    @property
    def is_repeating(self) -> bool:
        """Whether the last plan differs from the one before in positions and blocks only."""
        return self._decode is not None and self._decode.num_steps > 1

    def plan(self, plan: StepPlan, running: Sequence[Request]) -> bool:
        """Plan one token for each running request if the step can be an unchanged one.

        Args:
            plan: an empty plan.
            running: the running requests; the same ones as in the last call, unless `end` was
                called since then.

        Returns:
            Whether it can; otherwise the plan is still empty.
        """
        if self._decode is None:
            self._num_unchanged += 1
            if self._num_unchanged % STEADY_AFTER_STEPS or not _can_be_steady(running):
                return False
            self._decode = SteadyDecode(plan.step, running, self._kv_cache)
        if self._decode.plan(plan):
            return True
        self.end()
        return False

    def apply(self, plan: StepPlan, result: StepResult) -> dict[int, OutputColumns] | None:
        """See `SteadyDecode.apply`; None also if another step is applied, or one with failures."""
        if result.failures:
            self.end()
        if self._decode is None or plan.step < self._decode.first_step:
            return None
        return self._decode.apply(plan.step, result.token_ids)

    def end(self) -> None:
        """Forget the running requests: the next step is not an unchanged one."""
        self._decode = None
        self._num_unchanged = 0


def _can_be_steady(running: Sequence[Request]) -> bool:
    return (
        len(running) > 0
        and all(request.is_only_decoding for request in running)
        and len({request.num_in_flight for request in running}) == 1
    )


class SteadyDecode:
    """
    Args:
        first_step: the number of the first step that it will plan.
        requests: all running requests in their order. Each one `is_only_decoding`, and either
            all of them or none of them have a token in flight.
        kv_cache: allocates their blocks.

    Attributes:
        first_step: the number of the first step. The plans of all later steps come from this
            object, too.
        num_steps: the number of steps planned so far.
    """

    def __init__(
        self, first_step: int, requests: Sequence[Request], kv_cache: KVCacheManager
    ) -> None:
        self.first_step = first_step
        self._requests = list(requests)
        self._kv_cache = kv_cache
        self._rows = [request.row for request in requests]
        self.num_steps = 0
        self._num_applied = 0
        self._num_in_flight = requests[0].num_in_flight
        self._max_steps = min(request.num_tokens_left for request in requests) - self._num_in_flight
        self._stop_ids = frozenset[int]().union(*(request.stop_ids for request in requests))
        # Requests by the fill level of their last block: a step touches only one level.
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
        """Plan one token for each request.

        Returns:
            False, without any change, if there are too few free blocks or if a request ends with
            the token in flight.
        """
        kv_cache, requests, count = self._kv_cache, self._requests, len(self._requests)
        entering = self._by_phase[-self.num_steps % kv_cache.block_size]
        filling = self._by_phase[(self._num_in_flight - self.num_steps - 1) % kv_cache.block_size]
        if self.num_steps == self._max_steps or not kv_cache.can_extend(entering):
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
        plan.num_tokens = plan.num_sampled = count
        self.num_steps += 1
        return True

    def apply(self, step: int, token_ids: Sequence[int]) -> dict[int, OutputColumns] | None:
        """Append each request's token.

        Returns:
            The columns of each front end. None, without any change to the requests, if a request
            may end with its token: the caller then has to look at each request.
        """
        self._num_applied += 1
        if self._num_applied == self._max_steps or not self._stop_ids.isdisjoint(token_ids):
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
