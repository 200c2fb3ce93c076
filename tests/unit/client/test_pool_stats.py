"""Statistics of pools: sums, and counters that never fall."""

from __future__ import annotations

from support.fake_members import FakeMember, FakeWaiter

from shmllm.client.pool import EnginePool
from shmllm.client.pool_stats import PastStats, counters_of, sum_of_stats
from shmllm.client.revival import Revival
from shmllm.ipc.stats import Stat


class Stats:
    """A client that has only statistics."""

    def __init__(self, stats):
        self._stats = stats

    def stats(self):
        return self._stats


def test_counters_and_gauges_add_up_and_states_are_those_of_any_engine():
    stats = [{"paused": 1, "running": 2, "steps": 5}, {"paused": 0, "running": 3, "steps": 7}]
    assert sum_of_stats(stats) == {"paused": 1, "running": 5, "steps": 12}


def test_an_engine_that_was_replaced_leaves_its_counters():
    past = PastStats()
    assert past.with_those_of([Stats({"steps": 2})], [0]) == {"steps": 2}
    past.add({"paused": 1, "running": 2, "steps": 5})
    past.add({"paused": 0, "running": 2, "steps": 6})
    running = Stats({"steps": 2, "running": 1, "paused": 0})
    assert past.with_those_of([running], [0]) == {
        "steps": 13,
        "running": 1,
        "paused": 0,
    }


def test_every_statistic_is_a_counter_or_known_as_something_else():
    ended = counters_of({stat.name.lower(): 1 for stat in Stat})
    assert {name for name, value in ended.items() if value} == {
        "steps", "prefix_query_tokens", "prefix_hit_tokens", "preemptions", "prompt_tokens",
        "generated_tokens", "requests_finished", "times_parked", "drafts", "draft_tokens",
        "accepted_tokens", "shared_query_tokens", "shared_hit_tokens", "shared_blocks_lent",
        "shared_blocks_saved", "shared_blocks_reused", "item_queries", "item_hits",
        *(name for name in ended if name.endswith("_ns")),
    }  # fmt: skip


def test_no_counter_of_a_pool_falls_when_engines_end():
    waiter = FakeWaiter()
    members = [FakeMember(waiter) for _ in range(2)]
    for member in members:
        member.counters = {"steps": 10, "running": 1}
    pool = EnginePool(members, Revival(lambda index: FakeMember(waiter)))
    pool.wait_ready()
    assert pool.stats() == {"steps": 20, "running": 2}
    members[0].is_dead = True
    pool.poll(0.001)
    assert pool.stats() == {"steps": 20, "running": 1}
    pool.poll(0.001)
    pool.poll(0.001)
    assert pool.pids[0] != members[0].pid
    assert pool.stats() == {"steps": 20, "running": 1}
