"""Pace: with simulated times of steps, it drafts as much as pays and no more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shmllm.engine.drafting.pace import LAST_PROBE, PROBED, Offer, Pace

Cost = Callable[[int], float]


def bound_by_reading(num_tokens: int) -> float:
    """A step takes as long for 16 tokens as for one."""
    return 1e6 * max(1.0, num_tokens / 16)


def bound_by_computing(num_tokens: int) -> float:
    return 1e6 * num_tokens


def drive(
    pace: Pace, cost: Cost, offers: list[Offer], num_requests: int, steps: int
) -> list[list[int]]:
    """Run steps that take what `cost` says of their number of tokens."""
    found = []
    for _ in range(steps):
        counts = pace.choose(offers, num_requests)
        num_tokens = num_requests + sum(counts)
        pace.measured(num_tokens, sum(counts) > 0, round(cost(num_tokens)))
        found.append(counts)
    return found


def test_all_drafts_are_computed_where_they_cost_nothing() -> None:
    found = drive(Pace(), bound_by_reading, [Offer(0.8, 6)], 1, 40)
    assert found[0] == [0]  # what they are compared with
    assert [counts[0] for counts in found[1:6]] == [1, 2, 3, 5, 6]  # sizes are tried bit by bit
    assert sum(counts == [6] for counts in found) > 30


def test_no_drafts_are_computed_where_they_cost_what_they_give() -> None:
    pace = Pace()
    found = drive(pace, bound_by_computing, [Offer(0.9, 6)] * 8, 8, 300)
    assert pace.break_even == pytest.approx(1, abs=0.05)
    assert sum(sum(counts) > 0 for counts in found) < 10


def test_requests_with_better_chances_get_more() -> None:
    def cost(num_tokens: int) -> float:
        return 1e6 * (1 + num_tokens / 20)

    found = drive(Pace(), cost, [Offer(0.9, 8), Offer(0.4, 8), Offer(0.01, 8)], 3, 60)
    high, low, none = found[-5]
    assert high > low > none == 0


def test_an_acceptance_of_nothing_costs_few_steps_more_and_more_rarely() -> None:
    pace = Pace()
    drive(pace, bound_by_reading, [Offer(0.5, 8)], 2, 40)

    def cost(num_tokens: int) -> float:
        return 1e6 * (1 + num_tokens / 50)

    found = drive(pace, cost, [Offer(0.001, 8)], 2, 4000)
    tried = [step for step, counts in enumerate(found) if sum(counts)]
    assert all(counts[0] <= PROBED for counts in found[-3000:])
    assert len(tried) < 60
    assert tried[-1] - tried[-1 - PROBED] == LAST_PROBE


def test_a_wrong_time_without_drafts_is_measured_again() -> None:
    pace = Pace()
    pace.measured(4, False, 10**9)  # something else had the cores
    found = drive(pace, bound_by_computing, [Offer(0.5, 4)] * 4, 4, 400)
    assert sum(sum(counts) > 0 for counts in found[200:]) <= 2 * PROBED


def test_more_than_is_offered_is_never_chosen() -> None:
    found = drive(Pace(), bound_by_reading, [Offer(0.99, 1), Offer(0.99, 3)], 2, 30)
    assert max(counts[0] for counts in found) == 1
    assert max(counts[1] for counts in found) == 3
