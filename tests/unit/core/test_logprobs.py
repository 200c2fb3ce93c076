"""Log-probabilities in the scheduler: one for each position, in the row of its request."""

from __future__ import annotations

from collections import defaultdict

import pytest
from support.fakes import FakeRunner, info

from shmllm.config.engine import SchedulerConfig
from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.request import Request
from shmllm.core.scheduler import Scheduler
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams


class Bench:
    """Runs requests and collects their tokens, log-probabilities and prompt log-probabilities."""

    def __init__(self, *, num_blocks=32, budget=64, num_seqs=8):
        self.manager = KVCacheManager(num_blocks + 1, 4, True)
        self.scheduler = Scheduler(
            SchedulerConfig(num_seqs, budget, scheduler_reserve_full_isl=False), self.manager
        )
        self.runner = FakeRunner(info(num_blocks=num_blocks, block_size=4))
        self.tokens, self.logprobs = defaultdict(list), defaultdict(list)
        self.prompt = defaultdict(list)
        self.cached = {}

    def add(self, number, prompt, *, client=0, **options):
        if isinstance(prompt, int):
            prompt = [(number * 7 + i) % 50 for i in range(prompt)]
        params = SamplingParams(**{"max_tokens": 4} | options)
        self.scheduler.add(
            Request(client, EngineCoreRequest(number, prompt, params), seed=1, max_model_len=64)
        )

    def step(self, between=lambda: None):
        plan = self.scheduler.schedule()
        if not plan.num_tokens:
            return
        result = self.runner.execute(plan)
        between()
        for client, columns in self.scheduler.apply(plan, result).items():
            self._take(client, columns)
        self.scheduler.check_integrity()

    def run(self):
        for _ in range(500):
            if not self.scheduler.has_unfinished():
                return
            self.step()
        raise AssertionError("requests never ended")

    def _take(self, client, columns):
        for number, token in zip(columns.numbers, columns.token_ids, strict=True):
            self.tokens[client, number].append(token)
        for row, count in zip(columns.cached_rows, columns.cached_counts, strict=True):
            self.cached[client, columns.numbers[row]] = count
        for scored in columns.prompt_logprobs:
            known = self.prompt[client, scored.number]
            assert scored.first == len(known) + 1
            known += scored.logprobs.tolist()
        if (logprobs := columns.logprobs) is not None:
            assert logprobs.rows == sorted(set(logprobs.rows))
            for row, value in zip(logprobs.rows, logprobs.logprobs.tolist(), strict=True):
                self.logprobs[client, columns.numbers[row]].append(value)


@pytest.mark.parametrize("budget", [3, 8, 64])
@pytest.mark.parametrize("length", [1, 2, 8, 9, 23])
def test_every_prompt_token_but_the_first_has_one_logprob(budget, length):
    bench = Bench(budget=budget)
    bench.add(0, length, prompt_logprobs=1)
    bench.add(1, 7)
    bench.run()
    assert bench.prompt[0, 0] == list(range(1, length))
    assert bench.prompt[0, 1] == []


def test_a_preempted_request_reports_no_logprob_twice():
    bench = Bench(num_blocks=9, budget=12)
    for number in range(4):
        bench.add(number, 10, max_tokens=8, prompt_logprobs=0, logprobs=0)
    bench.run()
    assert bench.scheduler.stats.preemptions > 0
    for number in range(4):
        assert bench.prompt[0, number] == list(range(1, 10))
        assert len(bench.tokens[0, number]) == 8
        assert bench.logprobs[0, number] == bench.tokens[0, number]


def test_a_request_preempted_within_its_prompt_reports_no_logprob_twice():
    bench = Bench(num_blocks=8, budget=8, num_seqs=4)
    bench.add(0, 8, max_tokens=20)
    bench.step()
    bench.add(1, 22, max_tokens=2, prompt_logprobs=2)
    bench.run()
    assert bench.scheduler.stats.preemptions > 0
    assert bench.prompt[0, 1] == list(range(1, 22))


def test_a_prompt_with_logprobs_does_not_read_the_prefix_cache():
    bench = Bench()
    for number, options in enumerate(
        [{}, {"prompt_logprobs": 0}, {}, {"skip_reading_prefix_cache": True}]
    ):
        bench.add(number, list(range(1, 18)), **options)
        bench.run()
    assert [bench.cached[0, number] for number in range(4)] == [0, 0, 16, 0]
    assert bench.scheduler.stats.prefix_query_tokens == 2 * 17


def test_a_prompt_with_logprobs_fills_the_prefix_cache():
    bench = Bench()
    bench.add(0, list(range(1, 18)), prompt_logprobs=0)
    bench.run()
    bench.add(1, list(range(1, 18)))
    bench.run()
    assert bench.cached[0, 1] == 16


def test_logprobs_go_to_the_front_end_and_row_that_asked_for_them():
    bench = Bench()
    for number in range(8):
        options = {"logprobs": number % 3} if number % 2 else {}
        bench.add(number, number + 1, client=number % 3, max_tokens=3 + number, **options)
    bench.run()
    for number in range(8):
        key = number % 3, number
        assert len(bench.tokens[key]) == 3 + number
        assert bench.logprobs[key] == (bench.tokens[key] if number % 2 else [])


@pytest.mark.parametrize("aborted", [0, 1, 2])
def test_an_abort_during_a_step_does_not_affect_the_logprobs_of_others(aborted):
    bench = Bench()
    for number in range(3):
        bench.add(number, 5, logprobs=number, prompt_logprobs=0)
    bench.step(between=lambda: bench.scheduler.abort(0, aborted))
    assert bench.tokens[0, aborted] == []
    assert bench.prompt[0, aborted] == []
    bench.run()
    for number in {0, 1, 2} - {aborted}:
        assert bench.logprobs[0, number] == bench.tokens[0, number]
        assert bench.prompt[0, number] == [1, 2, 3, 4]


def test_completions_of_one_prompt_share_its_blocks_within_a_step():
    """The completions of a request with n > 1 arrive together and are planned in one step."""
    bench = Bench()
    for number in range(4):
        bench.add(number, list(range(1, 18)))
    bench.step()
    assert [bench.cached[0, number] for number in range(4)] == [0, 16, 16, 16]
    assert bench.manager.num_used_blocks == 4 + 4
