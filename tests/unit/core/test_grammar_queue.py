"""Requests with a grammar wait for it, do not delay other requests, and end with the grammar."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.fakes import FakeConstraint, FakeRunner, expected_tokens, info

from shmllm.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from shmllm.config.load import LoadConfig
from shmllm.core.scheduler_stats import Failure
from shmllm.engine.core import EngineCore
from shmllm.errors import RequestError
from shmllm.outputs.columns import FinishReason
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams


class Bench:
    """An engine core with a fake runner. It records the outputs of each request."""

    def __init__(self, **changes: int) -> None:
        config = EngineConfig(
            LoadConfig("nowhere"),
            CacheConfig(),
            SchedulerConfig(8, 64, scheduler_reserve_full_isl=False),
        )
        self.runner = FakeRunner(info(**changes))
        self.num_wakes = 0
        self.core = EngineCore(config, self.runner, self.wake)
        self.constraints: list[FakeConstraint] = []
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, str | None] = {}
        self.failures: list[Failure] = []

    def wake(self) -> None:
        self.num_wakes += 1

    def add(
        self, number: int, grammar: str = "", max_tokens: int = 8, client: int = 0
    ) -> str | None:
        params = SamplingParams(max_tokens=max_tokens)
        request = EngineCoreRequest(number, self.prompt(number), params, grammar=grammar)
        rejected = self.core.add(client, request)
        return None if rejected is None else rejected.message

    def prompt(self, number: int) -> list[int]:
        return [(number * 7 + i) % 50 for i in range(6)]

    def compiled(self, grammar: str, length: int, fails_at: int = 0) -> None:
        def begin() -> FakeConstraint:
            self.constraints.append(FakeConstraint(length, fails_at))
            return self.constraints[-1]

        self.runner.compile_grammar(grammar).set_result(begin)

    def step(self) -> None:
        for columns in self.core.step().values():
            rows = zip(columns.numbers, columns.token_ids, columns.finishes, strict=True)
            for number, token_id, finish in rows:
                self.tokens.setdefault(number, []).append(token_id)
                if finish:
                    assert number not in self.ends
                    self.ends[number] = FinishReason(finish).text
        self.failures += self.core.take_failures()
        self.core.scheduler.check_integrity()

    def run(self) -> None:
        for _ in range(100):
            if not self.core.scheduler.has_unfinished():
                return
            self.step()
        raise AssertionError("requests never ended")


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_request_runs_when_its_grammar_is_compiled(bench: Bench) -> None:
    assert bench.add(1, "g") is None
    bench.step()
    assert (bench.core.scheduler.num_waiting, bench.runner.plans) == (1, [])
    bench.compiled("g", length=3)
    assert bench.num_wakes == 1
    bench.run()
    assert bench.ends == {1: "stop"}
    assert bench.tokens[1] == expected_tokens(bench.prompt(1), 3)
    assert bench.constraints[0].taken == bench.tokens[1]


def test_later_requests_do_not_wait_for_a_grammar(bench: Bench) -> None:
    bench.add(1, "slow")
    bench.add(2)
    for _ in range(8):
        bench.step()
    assert bench.ends == {2: "length"}
    bench.compiled("slow", length=2)
    bench.run()
    assert bench.ends == {1: "stop", 2: "length"}


def test_a_compiled_grammar_causes_no_wait(bench: Bench) -> None:
    bench.compiled("g", length=2)
    bench.add(1, "g")
    bench.add(2, "g")
    bench.step()
    assert (len(bench.runner.plans[0].rows), bench.num_wakes) == (2, 0)
    bench.run()
    assert len(bench.constraints) == 2
    assert [len(constraint.taken) for constraint in bench.constraints] == [2, 2]


def test_a_plan_has_the_constraints_of_the_requests_that_it_samples(bench: Bench) -> None:
    bench.compiled("g", length=4)
    for number, grammar in ((1, ""), (2, "g"), (3, ""), (4, "g")):
        bench.add(number, grammar)
    bench.step()
    first, second = bench.constraints
    assert bench.runner.plans[0].constraints == [(1, 1, first), (3, 3, second)]


def test_an_incomplete_prompt_has_no_constraint_in_the_plan() -> None:
    config = EngineConfig(
        LoadConfig("nowhere"),
        CacheConfig(),
        SchedulerConfig(8, 4, scheduler_reserve_full_isl=False),
    )
    runner = FakeRunner(info())
    core = EngineCore(config, runner)
    runner.compile_grammar("g").set_result(lambda: FakeConstraint(2))
    core.add(0, EngineCoreRequest(0, [1] * 6, SamplingParams(), grammar="g"))
    core.step()
    core.step()
    assert [len(plan.constraints) for plan in runner.plans] == [0, 1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_grammar_that_cannot_be_compiled_ends_only_its_request(bench: Bench, when: str) -> None:
    def fail() -> None:
        bench.runner.compile_grammar("bad").set_exception(RequestError("no such token"))

    if when == "before":
        fail()
        assert bench.add(1, "bad") == "no such token"
    else:
        assert bench.add(1, "bad") is None
        fail()
    bench.add(2)
    bench.run()
    assert bench.ends == {2: "length"}
    assert bench.failures == ([] if when == "before" else [Failure(0, 1, "no such token")])


def test_an_output_that_cannot_continue_ends_with_a_message(bench: Bench) -> None:
    bench.compiled("g", length=9, fails_at=3)
    bench.add(1, "g")
    bench.add(2)
    bench.run()
    assert bench.failures == [Failure(0, 1, "does not fit")]
    assert bench.ends == {2: "length"}  # the first request's end is reported with its failure
    assert len(bench.tokens[1]) == 3


def test_the_end_of_the_grammar_has_precedence_over_max_tokens(bench: Bench) -> None:
    bench.compiled("g", length=4)
    bench.add(1, "g", max_tokens=4)
    bench.add(2, "g", max_tokens=3)
    bench.run()
    assert bench.ends == {1: "stop", 2: "length"}


@pytest.mark.parametrize(
    "abort",
    [
        lambda core: core.abort(0, [1]),
        lambda core: core.scheduler.abort_client(0),
    ],
)
def test_a_request_that_is_aborted_while_it_waits_never_runs(
    bench: Bench, abort: Callable[[EngineCore], object]
) -> None:
    bench.add(1, "g")
    abort(bench.core)
    assert not bench.core.scheduler.has_unfinished()
    assert bench.core.scheduler.num_waiting == 0
    bench.compiled("g", length=2)
    bench.step()
    assert (bench.tokens, bench.failures, bench.constraints) == ({}, [], [])


def test_a_held_request_counts_as_unfinished_and_its_number_as_used(bench: Bench) -> None:
    bench.add(1, "g")
    assert bench.add(1) == "request number 1 is in use"
    assert bench.core.scheduler.unfinished() == {0: [1]}


def test_the_constraint_of_a_preempted_request_gets_each_token_once() -> None:
    bench = Bench(num_blocks=6)
    bench.compiled("g", length=12)
    for number in (1, 2, 3):
        bench.add(number, "g", max_tokens=12)
    bench.run()
    assert bench.core.scheduler.stats.preemptions > 0
    assert bench.ends == dict.fromkeys((1, 2, 3), "stop")
    for number, constraint in zip((1, 2, 3), bench.constraints, strict=True):
        assert constraint.taken == bench.tokens[number] == expected_tokens(bench.prompt(number), 12)


def test_requests_of_a_paused_front_end_do_not_run(bench: Bench) -> None:
    bench.add(1, "g")
    bench.core.scheduler.pause_client(0)
    bench.compiled("g", length=1)
    bench.step()
    assert bench.tokens == {}
    bench.core.scheduler.resume_client(0)
    bench.run()
    assert bench.ends == {1: "stop"}
