"""Asks a drafter for the tokens that the next step may compute, and measures whether that pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shmllm.config.speculative import SpeculativeConfig
from shmllm.core.drafts import Acceptance
from shmllm.core.plan import StepPlan
from shmllm.core.request import Request
from shmllm.core.scheduler import Scheduler
from shmllm.engine.drafting.drafter import Drafter
from shmllm.engine.drafting.pace import FIRST_PROBE, LAST_PROBE, Offer, Pace

GIVEN_UP = 32
"""After so many steps without drafts, a request gets no more of a drafter that would have to catch
up with them: that takes as long as it would have taken before."""


class Drafting:
    """
    Args:
        config: how many tokens are drafted.
        drafter: drafts them.
        scheduler: has the requests.
        keeps_state_of: whether no tokens may be drafted for the request in a row.

    Attributes:
        acceptance: how often the drafts of all requests are accepted.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        drafter: Drafter,
        scheduler: Scheduler,
        keeps_state_of: Callable[[int], bool],
    ) -> None:
        self._most = config.most_drafted
        self._drafter = drafter
        self._scheduler = scheduler
        self._keeps_state_of = keeps_state_of
        first_probe = LAST_PROBE if drafter.catches_up else FIRST_PROBE
        self._pace = Pace(first_probe) if config.adaptive else None
        self.acceptance = Acceptance()
        self._drafted_before: set[Request] = set()

    def draft(self) -> None:
        """Draft tokens for the running requests that decode."""
        running = self._scheduler.running
        decoding = [each for each in running if self._is_draftable(each)]
        offers = [(each, draft) for each in decoding if (draft := self._draft(each))]
        if self._pace is not None and offers:
            offered = [Offer(each.acceptance.probability, len(draft)) for each, draft in offers]
            counts = self._pace.choose(offered, len(running))
            self._scheduler.stats.draft_break_even = self._pace.break_even
            offers = [
                (each, draft[:count])
                for (each, draft), count in zip(offers, counts, strict=True)
                if count
            ]
        for each in decoding:
            each.acceptance.num_idle += 1
        for each, _ in offers:
            each.acceptance.num_idle = 0
        self._scheduler.offer_drafts(dict(offers))

    def _is_draftable(self, request: Request) -> bool:
        return (
            request.pooling is None
            and request.embeds is None
            and not request.items
            and request.num_uncomputed_tokens <= 1 + self._most
            and request.num_output_tokens > 0
            and request.num_tokens_left > 1
            and not self._keeps_state_of(request.row)
        )

    def _draft(self, request: Request) -> Sequence[int]:
        if request.acceptance is None:
            request.acceptance = Acceptance(self.acceptance)
        if self._drafter.catches_up and request.acceptance.num_idle >= GIVEN_UP:
            return ()
        return self._drafter.draft(request, min(self._most, request.num_tokens_left - 1))

    def applied(self, plan: StepPlan, time_ns: int) -> None:
        """Take note of a step whose results were applied.

        Args:
            plan: the step's plan.
            time_ns: how long the step took.
        """
        only_decodes = plan.num_tokens == len(plan.requests) + plan.num_drafts
        with_drafts = {plan.requests[index] for index in plan.drafts}
        is_usual = not self._drafter.catches_up or with_drafts <= self._drafted_before
        self._drafted_before = with_drafts
        if self._pace is not None and only_decodes and is_usual:
            self._pace.measured(plan.num_tokens, bool(plan.drafts), time_ns)
