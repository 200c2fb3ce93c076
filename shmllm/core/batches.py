"""The batches that are under way at a time: one, or as many as a pipeline has stages.

A step computes one batch, and its result is applied before the same batch has the next step. A
request samples in one of them at a time. This module owns what each batch may have, and which
requests and rows a step in flight still uses. It must not know how tokens are chosen.
"""

from __future__ import annotations

from shmllm.config.engine import SchedulerConfig
from shmllm.core.plan import StepPlan
from shmllm.core.request import Request

PIPELINED_TOKENS = 128
"""How many tokens a batch of a pipeline has at most, unless it has more requests. While a stage
computes a long chunk of a prompt, the next one has nothing to do; so many tokens keep a CPU's core
as busy as more would."""


class Batches:
    """
    Args:
        config: the limits of one batch.
        count: how many batches there are.
        longest_whole: the longest prompt that a step computes as a whole; 0: prompts are computed
            in chunks of any length.
        longest_span: the most tokens that a step must not divide; 0: it may divide all.

    Attributes:
        are_several: whether there is more than one: the steps of a pipeline.
        max_requests: the largest number of requests in a batch.
        budget: the largest number of tokens in a batch.
        longest_chunk: the largest number of a request's tokens in a batch.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        count: int,
        longest_whole: int = 0,
        longest_span: int = 0,
    ) -> None:
        self._count = count
        self._last_applied = -1
        self.are_several = count > 1
        # With more rows than tokens in the budget, the last rows would starve.
        self.max_requests = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.budget = config.max_num_batched_tokens
        if self.are_several:
            self.budget = min(self.budget, max(PIPELINED_TOKENS, self.max_requests))
        self.budget = max(self.budget, longest_whole, longest_span)
        longest = config.long_prefill_token_threshold or self.budget
        self.longest_chunk = max(longest, longest_span)
        self._are_whole = longest_whole > 0

    @property
    def num_rows(self) -> int:
        """The largest number of requests in all batches together."""
        return self.max_requests * self._count

    def chunk(self, num_tokens: int, num_planned: int) -> int:
        """The number of tokens that a batch computes of a request that waits.

        Args:
            num_tokens: how many of its tokens have not been computed.
            num_planned: how many tokens the batch has already.

        Returns:
            At least 1; 0: the batch has no room for a prompt that is computed as a whole.
        """
        room = self.budget - num_planned
        if self._are_whole:
            return num_tokens if num_tokens <= room else 0
        return min(num_tokens, self.longest_chunk, room)

    def has_room(self, plan: StepPlan, most_requests: int) -> bool:
        """Whether a batch with at most so many requests has room for another one."""
        return plan.num_tokens < self.budget and len(plan.requests) < most_requests

    def most_requests(self, count: int) -> int:
        """The largest number of requests in the next step, if the batches share `count`."""
        return min(self.max_requests, -(-count // self._count))

    def applied(self, step: int) -> None:
        """Take note that the result of a step is applied."""
        self._last_applied = step

    def has(self, request: Request) -> bool:
        """Whether another batch computes tokens of the request: it may get its next token then.

        With one batch that does not matter for a request that waits: the step that preempts it
        admits none, and the result of the step before is applied before the next one is planned.
        """
        return self.are_several and request.last_step > self._last_applied

    def last_step_of_row(self, request: Request) -> int | None:
        """The last step that uses the row of a request that leaves it; None if that may have
        another request now. A pipeline samples a batch by the state of its rows when it has the
        next one's inputs."""
        return request.last_step if self.has(request) else None
