"""Pooling requests in the scheduler: chunks, the prefix cache, preemption, aborts, last rows."""

from __future__ import annotations

import pytest
from support.fakes import FakeRunner, expected_tokens, info

from shmllm.config.engine import SchedulerConfig
from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.request import Request
from shmllm.core.scheduler import Scheduler
from shmllm.outputs.columns import FinishReason
from shmllm.params.pooling import Pooling, PoolingType
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams

LAST, MEAN = Pooling(PoolingType.LAST), Pooling(PoolingType.MEAN)


class Bench:
    """A scheduler with a fake runner. It records vectors and tokens by request number."""

    def __init__(self, num_blocks=32, budget=64, policy="fcfs"):
        self.scheduler = Scheduler(
            SchedulerConfig(8, budget, policy, scheduler_reserve_full_isl=False),
            KVCacheManager(num_blocks + 1, 4, True),
        )
        self.runner = FakeRunner(info(num_blocks=num_blocks))
        self.vectors, self.tokens, self.cached, self.ends = {}, {}, {}, {}

    def add(self, number, prompt, pooling=None, max_tokens=4, priority=0):
        params = pooling or SamplingParams(temperature=0, max_tokens=max_tokens)
        request = Request(
            0,
            EngineCoreRequest(number, prompt, params, priority=priority),
            seed=0,
            max_model_len=64,
        )
        self.scheduler.add(request)
        return request

    def step(self):
        plan = self.scheduler.schedule()
        for columns in self.scheduler.apply(plan, self.runner.execute(plan)).values():
            if columns.embeddings is not None:
                for number, piece in zip(
                    columns.embeddings.numbers, columns.embeddings.pieces, strict=True
                ):
                    self.vectors[number] = piece.data
            for row, count in zip(columns.cached_rows, columns.cached_counts, strict=True):
                self.cached[columns.numbers[row]] = count
            tokens = iter(columns.token_ids)
            for number, count, finish in zip(
                columns.numbers, columns.counts, columns.finishes, strict=True
            ):
                self.tokens.setdefault(number, []).extend(next(tokens) for _ in range(count))
                if finish:
                    assert number not in self.ends
                    self.ends[number] = finish
        self.scheduler.check_integrity()
        return plan

    def run(self):
        while self.scheduler.has_unfinished():
            self.step()


def alone(prompt):
    bench = Bench()
    bench.add(1, prompt, LAST)
    bench.run()
    return bench.vectors[1]


PROMPT = [(7 * i) % 50 for i in range(22)]


@pytest.mark.parametrize("pooling", [LAST, MEAN])
def test_a_prompt_computed_in_chunks_has_one_vector(pooling):
    for budget in (3, 8, 64):
        bench = Bench(budget=budget)
        bench.add(1, PROMPT, pooling)
        bench.run()
        assert bench.vectors == {1: alone(PROMPT)}
        assert bench.ends == {1: FinishReason.STOP}
        assert bench.tokens == {1: []}
        assert not any(plan.samples for plan in bench.runner.plans)


def test_one_step_can_compute_vectors_and_tokens():
    bench = Bench(budget=16)
    bench.add(1, PROMPT, max_tokens=6)
    bench.add(2, PROMPT[::-1], MEAN)
    bench.add(3, PROMPT[3:], LAST)
    bench.add(4, PROMPT[5:], max_tokens=6)
    bench.run()
    assert bench.vectors == {2: alone(PROMPT[::-1]), 3: alone(PROMPT[3:])}
    assert bench.tokens[1] == expected_tokens(PROMPT, 6)
    assert bench.tokens[4] == expected_tokens(PROMPT[5:], 6)
    assert any(plan.pools and plan.samples for plan in bench.runner.plans)


def test_only_last_token_pooling_reads_the_prefix_cache():
    bench = Bench()
    for number, pooling in enumerate([LAST, LAST, MEAN, LAST]):
        bench.add(number, PROMPT, pooling)
        bench.run()
    assert bench.cached == {0: 0, 1: 20, 2: 0, 3: 20}
    assert set(bench.vectors.values()) == {alone(PROMPT)}


def test_a_preempted_pooling_request_starts_again():
    bench = Bench(num_blocks=9, budget=8, policy="priority")
    bench.add(2, PROMPT[::-1][:20], max_tokens=16)
    pooled = bench.add(1, PROMPT, MEAN, priority=1)
    bench.run()
    assert pooled.num_preemptions >= 1
    assert bench.vectors == {1: alone(PROMPT)}
    starts = [
        start
        for plan in bench.runner.plans
        for request, start in zip(plan.requests, plan.starts, strict=True)
        if request is pooled
    ]
    assert starts.count(0) == pooled.num_preemptions + 1


def test_an_aborted_pooling_request_has_no_vector():
    bench = Bench(budget=8)
    bench.add(1, PROMPT, MEAN)
    bench.step()
    bench.scheduler.abort(0, 1)
    bench.run()
    assert bench.vectors == {}


def test_a_request_that_is_aborted_during_its_step_has_no_output():
    bench = Bench()
    bench.add(1, PROMPT, LAST)
    plan = bench.scheduler.schedule()
    result = bench.runner.execute(plan)
    bench.scheduler.abort(0, 1)
    assert bench.scheduler.apply(plan, result) == {}
    bench.scheduler.check_integrity()
