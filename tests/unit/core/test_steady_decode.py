"""SteadyDecode plans and applies the same steps as the scheduler without it."""

from __future__ import annotations

import random
from dataclasses import astuple

import pytest
from support.variants import slow

from shmllm.config.engine import SchedulerConfig
from shmllm.core import steady_decode as module
from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.plan import StepPlan, StepResult
from shmllm.core.request import Request
from shmllm.core.scheduler import Scheduler
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import RepetitionDetectionParams, SamplingParams

VOCAB = 40
EOS = 3


class Engine:
    """A scheduler, and a runner whose tokens depend only on the request and the position."""

    def __init__(self, num_blocks: int, budget: int) -> None:
        self.kv_cache = KVCacheManager(num_blocks, 4, enable_prefix_caching=True)
        self.scheduler = Scheduler(
            SchedulerConfig(6, budget, scheduler_reserve_full_isl=False), self.kv_cache
        )
        self.before: StepPlan | None = None
        self.num_repeats = 0

    def add(self, client: int, number: int, length: int, options: dict[str, object]) -> None:
        params = SamplingParams(temperature=0, **options)  # type: ignore[arg-type]
        prompt = [(number * 5 + i) % VOCAB for i in range(length)]
        request = Request(
            client,
            EngineCoreRequest(number, prompt, params),
            seed=0,
            max_model_len=120,
            eos_token_ids=[EOS],
        )
        self.scheduler.add(request)

    def step(self) -> object:
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        planned = (
            [request.number for request in plan.requests],
            *map(list, (plan.rows, plan.starts, plan.counts, plan.samples)),
            [(a.row, list(a.token_ids), a.block_ids) for a in plan.new_requests],
            sorted(astuple(append) for append in plan.block_appends),
        )
        if plan.is_repeat:
            self._check_repeat(plan)
        self.before = plan
        tokens = [self._token(plan.requests[index]) for index in plan.samples]
        outputs = self.scheduler.apply(plan, StepResult(tokens))
        self.scheduler.check_integrity()
        for columns in outputs.values():
            columns.queued_ns = columns.scheduled_ns = []
        return planned, {client: astuple(columns) for client, columns in outputs.items()}

    def _check_repeat(self, plan: StepPlan) -> None:
        assert self.before is not None
        self.num_repeats += 1
        assert plan.requests == self.before.requests
        assert plan.starts == [start + 1 for start in self.before.starts]
        assert plan.samples == self.before.samples == list(range(len(plan.rows)))
        assert not plan.new_requests

    @staticmethod
    def _token(request: Request) -> int:
        return hash((request.number, request.num_tokens)) % VOCAB


def operations(rng: random.Random) -> list[tuple[str, tuple[object, ...]]]:
    """Random operations between steps; between most steps there are none."""
    made: list[tuple[str, tuple[object, ...]]] = []
    for number in range(60):
        options: dict[str, object] = {
            "max_tokens": rng.choice((1, 5, 30, 90)),
            "ignore_eos": rng.random() < 0.5,
            "min_tokens": 0,
        }
        if rng.random() < 0.3:
            options["min_tokens"] = options["max_tokens"]
        if rng.random() < 0.2:
            options["repetition_detection"] = RepetitionDetectionParams(
                max_pattern_size=3, min_pattern_size=1, min_count=2
            )
        made.append(("add", (rng.randrange(3), number, rng.randrange(1, 25), options)))
        made += [("step", ())] * rng.randrange(25)
        kind = rng.random()
        if kind < 0.1:
            made.append(("abort", (rng.randrange(3), rng.randrange(number + 1))))
        elif kind < 0.2:
            client = rng.randrange(3)
            made += [("pause", (client,)), *[("step", ())] * 7, ("resume", (client,))]
        elif kind < 0.25:
            made.append(("preempt", ()))
    return made


def run(
    num_blocks: int, budget: int, made: list[tuple[str, tuple[object, ...]]]
) -> tuple[list[object], int]:
    engine = Engine(num_blocks, budget)
    scheduler = engine.scheduler
    functions = {
        "add": engine.add,
        "abort": scheduler.abort,
        "pause": scheduler.pause_client,
        "resume": scheduler.resume_client,
        "preempt": scheduler.preempt_all,
    }
    seen = []
    for kind, arguments in made:
        if kind == "step":
            seen.append(engine.step())
        else:
            functions[kind](*arguments)  # type: ignore[operator]
    while scheduler.has_unfinished():
        seen.append(engine.step())
    assert engine.kv_cache.num_used_blocks == 0
    return seen, engine.num_repeats


@pytest.mark.parametrize("budget", [4, 64])
@pytest.mark.parametrize("num_blocks", [40, 400])
@pytest.mark.parametrize("seed", [0, 1, *map(slow, range(2, 6))])
def test_steps_are_the_same_without_steady_decode(
    monkeypatch: pytest.MonkeyPatch, seed: int, num_blocks: int, budget: int
) -> None:
    made = operations(random.Random(seed))
    with monkeypatch.context() as patch:
        patch.setattr(module, "STEADY_AFTER_STEPS", 10**9)
        expected, num_repeats = run(num_blocks, budget, made)
    assert not num_repeats
    seen, num_repeats = run(num_blocks, budget, made)
    assert seen == expected
    assert num_repeats > len(seen) / 10
