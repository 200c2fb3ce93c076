"""Drafted tokens: which of them a step computes, and what becomes of them.

A draft is a guess at the tokens behind the last known one of a request. A step computes them as if
they were known, and samples a token at each. Noise, penalties and grammars depend on a request's
own tokens and positions only, so the token sampled behind a prefix is the same whether the prefix
was drafted or not. Those up to the first that differs from its draft are therefore the tokens that
steps without drafts would have sampled; the others, and the keys and values behind them, count for
nothing.

This module must not know who drafts, nor when drafting pays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.plan import StepPlan
from shmllm.core.request import Request
from shmllm.core.saved_states import SavedStates
from shmllm.core.scheduler_stats import SchedulerStats

PRIOR, PRIOR_WEIGHT = 0.7, 2.0
"""The probability that a draft is accepted before any was, and how many drafts it counts as."""
DECAY = 0.97
"""The part of earlier trials that still counts after a further draft."""


class Acceptance:
    """How often the drafted tokens of a request are accepted, each if all before it were.

    Args:
        of_all: that of all requests, which a request without drafts is expected to be like; None:
            this is it.

    Attributes:
        num_idle: the number of steps since the last draft.
    """

    __slots__ = ("_accepted", "_of_all", "_trials", "num_idle")

    def __init__(self, of_all: Acceptance | None = None) -> None:
        self._of_all = of_all
        self._accepted = self._trials = 0.0
        self.num_idle = 0

    @property
    def probability(self) -> float:
        """The probability that the next one is accepted. What all requests say counts half beside
        the prior, so that a new request gets a chance."""
        prior = PRIOR if self._of_all is None else (self._of_all.probability + PRIOR) / 2
        return (self._accepted + prior * PRIOR_WEIGHT) / (self._trials + PRIOR_WEIGHT)

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Take note of a draft. The tokens behind the first wrong one were not tried."""
        self._accepted = DECAY * self._accepted + num_accepted
        self._trials = DECAY * self._trials + min(num_accepted + 1, num_drafted)
        if self._of_all is not None:
            self._of_all.add(num_drafted, num_accepted)


class Drafts:
    """
    Args:
        most_in_step: the largest number of drafted tokens in a step.
        kv_cache: has the blocks of states, if there are any.
        stats: counts drafts and accepted tokens.

    Attributes:
        offered: the drafts for the next step.
    """

    def __init__(self, most_in_step: int, kv_cache: KVCacheManager, stats: SchedulerStats) -> None:
        self._most_in_step = most_in_step
        self._states = SavedStates(kv_cache) if most_in_step and kv_cache.has_states else None
        self._stats = stats
        self.offered: Mapping[Request, Sequence[int]] = {}

    def usable(self, request: Request, plan: StepPlan, room: int) -> Sequence[int]:
        """The offered tokens of a request that a step can compute behind all of its known ones.

        Args:
            request: the request.
            plan: the step's plan so far.
            room: how many tokens the step and the request's chunk have room for.
        """
        offered = self.offered.get(request, ())
        if not offered:
            return ()
        if self._states is not None and not self._states.reserve(request):
            return ()
        most = min(room, request.num_tokens_left - 1, self._most_in_step - plan.num_drafts)
        return offered[: max(most, 0)]

    def plan(self, request: Request, plan: StepPlan, has_drafts: bool) -> None:
        """Plan what a step of a running request needs before it computes tokens from the request's
        `num_computed_tokens` on."""
        if self._states is not None:
            self._states.plan(request, plan, has_drafts)

    def release(self, request: Request) -> None:
        """Forget a request that leaves its row."""
        if self._states is not None:
            self._states.release(request)

    def settle(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Take note of how many drafted tokens were right. Those that were not do not count as
        computed any more."""
        if num_accepted < num_drafted:
            request.num_computed_tokens -= num_drafted - num_accepted
            if self._states is not None:
                self._states.go_back(request)
        request.num_draft_tokens += num_drafted
        request.num_accepted_tokens += num_accepted
        if request.acceptance is not None:
            request.acceptance.add(num_drafted, num_accepted)
        self._stats.add_draft(num_drafted, num_accepted)
