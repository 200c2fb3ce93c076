"""The policy "priority": the order of admission and preemption, which does not affect tokens."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from support.fakes import FakeRunner, expected_tokens, info

from shmllm.config.engine import SchedulerConfig
from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.priority_queue import PriorityQueue
from shmllm.core.request import Request
from shmllm.core.scheduler import Scheduler
from shmllm.errors import EngineStartError
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams


def request(number, prompt, priority=0, client=0, max_tokens=4):
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return Request(
        client,
        EngineCoreRequest(number, prompt, params, priority=priority),
        seed=0,
        max_model_len=64,
    )


class Bench:
    """A scheduler under the policy "priority", with a fake runner."""

    def __init__(self, num_blocks=32, num_seqs=8, budget=64, caching=False, reserves=False):
        self.manager = KVCacheManager(num_blocks + 1, 4, caching)
        config = SchedulerConfig(num_seqs, budget, "priority", scheduler_reserve_full_isl=reserves)
        self.scheduler = Scheduler(config, self.manager)
        self.runner = FakeRunner(info(num_blocks=num_blocks))
        self.tokens = defaultdict(list)
        self.requests = {}
        self.ended = []

    def add(self, number, prompt, priority=0, client=0, max_tokens=4):
        if isinstance(prompt, int):
            prompt = [(number * 7 + i) % 50 for i in range(prompt)]
        self.requests[number] = request(number, prompt, priority, client, max_tokens)
        self.scheduler.add(self.requests[number])

    def step(self):
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan.num_tokens:
            outputs = self.scheduler.apply(plan, self.runner.execute(plan))
            self.scheduler.check_integrity()
            for columns in outputs.values():
                for number, token, finish in zip(
                    columns.numbers, columns.token_ids, columns.finishes, strict=True
                ):
                    self.tokens[number].append(token)
                    if finish:
                        self.ended.append(number)
        return [each.number for each in plan.requests]

    def run(self, most=2000):
        for _ in range(most):
            if not self.scheduler.has_unfinished():
                return
            self.step()
        raise AssertionError("requests never ended")

    def check_tokens(self):
        for number, each in self.requests.items():
            prompt = list(each.token_ids[: each.num_prompt_tokens])
            assert self.tokens[number] == expected_tokens(prompt, each.max_tokens), number


def test_the_lowest_value_is_served_first_and_then_the_earliest_arrival():
    bench = Bench(num_seqs=1)
    for number, priority in [(1, 5), (2, 0), (3, -2), (4, 0), (5, -2)]:
        bench.add(number, 4, priority, max_tokens=1)
    bench.run()
    assert bench.ended == [3, 5, 2, 4, 1]
    bench.check_tokens()


def test_front_ends_are_not_served_round_robin():
    bench = Bench(num_seqs=1)
    for number in range(6):
        bench.add(number, 4, client=number % 2, max_tokens=1)
    bench.add(6, 4, priority=-1, client=1, max_tokens=1)
    bench.run()
    assert bench.ended == [6, 0, 1, 2, 3, 4, 5]


def test_a_running_request_continues_when_a_better_one_arrives():
    bench = Bench(budget=8)
    bench.add(1, 20, priority=1)
    bench.step()
    bench.add(2, 12, priority=0)
    assert bench.step() == [1]  # a new request does not interrupt it
    bench.scheduler.check_integrity()
    bench.run()
    assert bench.ended == [1, 2] or bench.ended == [2, 1]
    bench.check_tokens()


def test_no_room_is_kept_for_requests_that_give_way():
    bench = Bench(num_blocks=12, reserves=True)
    bench.add(1, 16, priority=1, max_tokens=28)  # four blocks, and seven until its end
    bench.step()
    bench.add(2, 16, priority=1, max_tokens=8)
    assert bench.step() == [1]
    bench.add(3, 16, priority=0, max_tokens=28)
    assert 3 in bench.step()
    bench.run()
    assert bench.ended[0] == 3
    bench.check_tokens()


def test_running_requests_are_computed_in_the_order_of_their_priority():
    bench = Bench()
    for number, priority in [(1, 3), (2, 1), (3, 2)]:
        bench.add(number, 4, priority, max_tokens=8)
        bench.step()
    assert bench.step() == [2, 3, 1]


def test_the_lowest_priority_is_preempted_even_if_it_arrived_first():
    bench = Bench(num_blocks=8)
    bench.add(1, 8, priority=9, max_tokens=12)
    bench.step()
    bench.add(2, 8, priority=0, max_tokens=12)
    bench.add(3, 8, priority=1, max_tokens=12)
    bench.run()
    assert bench.requests[1].num_preemptions >= 1
    assert bench.requests[2].num_preemptions == 0
    assert bench.ended[-1] == 1
    bench.check_tokens()


def test_of_equal_priorities_the_last_arrival_is_preempted():
    bench = Bench(num_blocks=6)
    for number in (1, 2):
        bench.add(number, 8, max_tokens=12)
    bench.run()
    assert bench.requests[1].num_preemptions == 0
    assert bench.requests[2].num_preemptions >= 1
    assert bench.ended == [1, 2]
    bench.check_tokens()


def test_a_preempted_request_keeps_its_place_in_the_order():
    bench = Bench(num_blocks=8, num_seqs=2)
    bench.add(1, 8, priority=5, max_tokens=16)
    bench.add(2, 8, priority=0, max_tokens=16)
    while not bench.requests[1].num_preemptions:
        bench.step()
    bench.add(3, 4, priority=4, max_tokens=1)
    bench.add(4, 4, priority=6, max_tokens=1)
    admitted = []
    while len(admitted) < 3:
        admitted += [n for n in bench.step() if n != 2 and n not in admitted]
    assert admitted == [3, 1, 4]
    bench.run()
    bench.check_tokens()


def test_a_low_priority_starves_only_as_long_as_better_requests_arrive():
    bench = Bench(num_blocks=8, num_seqs=2)
    bench.add(0, 8, priority=9, max_tokens=16)
    bench.step()
    for number in range(1, 40):
        bench.add(number, 12, priority=number % 3, max_tokens=12)
        for _ in range(6):
            bench.step()
    assert bench.requests[0].num_preemptions >= 1
    assert 0 not in bench.ended
    bench.run()
    assert bench.ended[-1] == 0
    bench.check_tokens()


@pytest.mark.parametrize("reserves", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_random_requests_get_the_tokens_of_solo_runs(seed, reserves):
    rng = random.Random(seed)
    bench = Bench(
        num_blocks=rng.choice([8, 12, 20]),
        num_seqs=rng.choice([2, 5]),
        budget=rng.choice([8, 32]),
        caching=rng.random() < 0.5,
        reserves=reserves,
    )
    for number in range(40):
        bench.add(
            number,
            rng.randint(1, 16),
            priority=rng.randint(-3, 3),
            client=rng.randint(0, 2),
            max_tokens=rng.randint(1, 14),
        )
        if rng.random() < 0.1:
            bench.scheduler.pause_client(rng.randint(0, 2))
        for _ in range(rng.randint(0, 3)):
            bench.step()
        for client in range(3):
            bench.scheduler.resume_client(client)
    bench.run()
    num_preemptions = sum(each.num_preemptions for each in bench.requests.values())
    assert reserves or num_preemptions > 0
    bench.check_tokens()


def test_the_queue_skips_paused_and_excluded_front_ends():
    queue = PriorityQueue()
    requests = [request(n, [1], priority=-n, client=n % 3) for n in range(6)]
    for arrival, each in enumerate(requests):
        each.arrival = arrival
        queue.add(each)
    queue.paused.add(2)
    assert queue.next() is requests[4]
    assert queue.next(excluded={1}) is requests[3]
    queue.paused.add(0)
    assert queue.next(excluded={1}) is None


def test_the_queue_stays_in_order_after_removals():
    rng = random.Random(1)
    queue, expected = PriorityQueue(), []
    for arrival in range(300):
        each = request(arrival, [1], rng.randint(0, 3), rng.randint(0, 2))
        each.arrival = arrival
        queue.add(each)
        expected.append(each)
        if rng.random() < 0.5:
            removed = expected.pop(rng.randrange(len(expected)))
            queue.remove(removed)
            if rng.random() < 0.3:
                queue.add_preempted(removed)
                expected.append(removed)
        expected.sort(key=lambda r: (r.priority, r.arrival))
        assert list(queue) == expected
        assert len(queue) == len(expected)
        assert queue.next() is (expected[0] if expected else None)


def test_a_released_request_gets_the_place_of_its_arrival():
    bench = Bench(num_seqs=1)
    held = request(0, [1, 2], max_tokens=1)
    bench.requests[0] = held
    bench.scheduler.hold(held)
    for number in (1, 2):
        bench.add(number, 4, max_tokens=1)
    bench.step()
    bench.scheduler.check_integrity()
    bench.scheduler.release(held)
    bench.run()
    assert bench.ended == [1, 0, 2]
    bench.check_tokens()
    aborted = request(5, [1, 2])
    bench.scheduler.hold(aborted)
    assert bench.scheduler.abort(0, 5) is aborted
    assert not bench.scheduler.has_unfinished()
    bench.scheduler.check_integrity()


def test_an_unknown_policy_is_refused():
    with pytest.raises(EngineStartError, match="'shortest' is not one of fcfs, priority"):
        SchedulerConfig(policy="shortest")
