"""Overlapped steps: requests get the same tokens as without overlap.

The fake runner executes submitted steps immediately, one step later, or only when their results
are waited for. Most tests run in all three ways.
"""

from __future__ import annotations

import random
from concurrent.futures import Future

import pytest
from support.fakes import FakeConstraint, FakeRunner, expected_tokens, info

from shmllm.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from shmllm.config.load import LoadConfig
from shmllm.core import steady_decode
from shmllm.core.pausing import PauseMode
from shmllm.engine.calls import run_method
from shmllm.engine.core import EngineCore
from shmllm.engine.sleep import LEVELS
from shmllm.outputs.columns import FinishReason
from shmllm.params.pooling import Pooling, PoolingType
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.wire.messages import Method

LAGS = {"immediately": lambda: 0, "late": lambda: 1, "waited for": lambda: 2}


class Engine:
    """An engine core. It records the outputs of its front ends."""

    def __init__(self, lag, *, num_blocks=16, budget=64, num_seqs=8, policy="fcfs"):
        config = EngineConfig(
            LoadConfig("nowhere"),
            CacheConfig(),
            SchedulerConfig(num_seqs, budget, policy, scheduler_reserve_full_isl=False),
        )
        self.runner = FakeRunner(info(num_blocks=num_blocks), lag)
        self.core = EngineCore(config, self.runner)
        self.tokens, self.ends, self.prompt_positions, self.vectors = {}, {}, {}, {}
        self.logprobs = {}

    def add(self, number, prompt, *, client=0, constraint=None, priority=0, **options):
        params = SamplingParams(**{"temperature": 0, "max_tokens": 4} | options)
        grammar = ""
        if constraint is not None:
            grammar = f"grammar {number}"
            future = self.runner.grammars[grammar] = Future()
            future.set_result(lambda: constraint)
        rejected = self.core.add(
            client, EngineCoreRequest(number, prompt, params, priority=priority, grammar=grammar)
        )
        assert rejected is None

    def pool(self, number, prompt):
        assert (
            self.core.add(0, EngineCoreRequest(number, prompt, Pooling(PoolingType.LAST))) is None
        )

    def step(self):
        self.take(self.core.step().items())

    def take(self, outputs):
        for client, columns in outputs:
            for scored in columns.prompt_logprobs:
                positions = self.prompt_positions.setdefault((client, scored.number), [])
                count = len(scored.ranks)
                positions += range(scored.first, scored.first + count)
            if columns.embeddings is not None:
                for number, piece in zip(
                    columns.embeddings.numbers, columns.embeddings.pieces, strict=True
                ):
                    self.vectors[number] = piece.data
            tokens = iter(columns.token_ids)
            rows = zip(columns.numbers, columns.counts, columns.finishes, strict=True)
            for number, count, finish in rows:
                key = client, number
                assert key not in self.ends, "a request has a row after its end"
                self.tokens.setdefault(key, []).extend(next(tokens) for _ in range(count))
                if finish:
                    self.ends[key] = FinishReason(finish)

    def call(self, method, argument=None, client=0):
        result = run_method(self.core, client, method, argument)
        self.take(self.core.take_outputs())
        return result

    def abort(self, number, client=0):
        columns = self.core.abort(client, [number])
        self.take([(client, columns)])

    def run(self):
        for _ in range(2000):
            if not self.core.has_unfinished:
                break
            self.step()
            self.core.scheduler.check_integrity()
        assert not self.core.has_unfinished
        self.core.scheduler.check_integrity()
        assert self.core.num_used_blocks == 0


@pytest.fixture(params=LAGS)
def make(request):
    return lambda **options: Engine(LAGS[request.param], **options)


def test_the_next_step_is_submitted_before_the_previous_one_has_ended():
    engine = Engine(LAGS["waited for"])
    engine.add(0, [1, 2, 3], max_tokens=6)
    engine.run()
    assert engine.runner.most_under_way == 2
    assert engine.tokens[0, 0] == expected_tokens([1, 2, 3], 6)


@pytest.mark.parametrize("length", [1, 3, 20])
def test_a_request_that_ends_by_its_length_is_not_computed_beyond(make, length):
    engine = make()
    engine.add(0, [1, 2, 3], max_tokens=length)
    engine.run()
    assert [plan.num_tokens for plan in engine.runner.plans] == [3] + [1] * (length - 1)


def test_tokens_after_a_stop_token_are_dropped(make):
    engine = make()
    wanted = expected_tokens([1, 2, 3], 9)
    stop = wanted[4]
    first = wanted.index(stop)
    engine.add(0, [1, 2, 3], max_tokens=9, stop_token_ids=[stop])
    engine.add(1, [4, 5], max_tokens=9)
    engine.run()
    assert engine.tokens[0, 0] == wanted[: first + 1]
    assert engine.ends[0, 0] is FinishReason.STOP
    assert engine.tokens[0, 1] == expected_tokens([4, 5], 9)


def test_a_row_can_be_reused_while_its_last_step_runs(make):
    engine = make(num_seqs=1, num_blocks=5)
    for number in range(6):
        engine.add(number, [number] * 5, max_tokens=8)
    for number in (0, 2, 4):
        for _ in range(3):
            engine.step()
        engine.abort(number)
    engine.run()
    for number in (1, 3, 5):
        assert engine.tokens[0, number] == expected_tokens([number] * 5, 8)
        assert engine.ends[0, number] is FinishReason.LENGTH


def test_a_request_preempted_with_a_token_in_flight_keeps_that_token(make):
    engine = make(num_blocks=6)
    for number in range(3):
        engine.add(number, [number + 1] * 4, max_tokens=12)
    engine.run()
    assert engine.core.scheduler.stats.preemptions > 0
    for number in range(3):
        assert engine.tokens[0, number] == expected_tokens([number + 1] * 4, 12)
    assert sum(len(plan.samples) for plan in engine.runner.plans) == 3 * 12, "sampled twice"


def test_a_request_preempted_with_a_vector_in_flight_keeps_that_vector(make):
    engine = make(num_blocks=5, policy="priority")
    for length in range(6, 14):
        engine.add(2 * length, [7] * 7, max_tokens=13)
        for _ in range(length - 6):
            engine.step()
        num_plans = len(engine.runner.plans)
        engine.pool(2 * length + 1, [5] * 8)
        engine.run()
        assert 2 * length + 1 in engine.vectors
        plans = engine.runner.plans[num_plans:]
        assert sum(pool.is_last for plan in plans for pool in plan.pools) == 1, "computed twice"


def test_a_request_preempted_with_its_last_token_in_flight_ends_while_it_waits(make):
    engine = make(num_blocks=4)
    # The second request needs a block in the step that samples the first request's last token.
    for length in range(2, 9):
        engine.add(2 * length, [7] * 5, max_tokens=12)
        engine.add(2 * length + 1, [9] * 4, max_tokens=length)
        engine.run()
        assert engine.tokens[0, 2 * length] == expected_tokens([7] * 5, 12)
        assert engine.tokens[0, 2 * length + 1] == expected_tokens([9] * 4, length)


def test_a_constraint_gets_each_token_before_the_next_one_is_sampled(make):
    engine = make(num_blocks=64)
    short, long = FakeConstraint(5), FakeConstraint(9)
    engine.add(0, [1, 2], constraint=short, max_tokens=20)
    engine.add(1, [3, 4], constraint=long, max_tokens=20)
    engine.add(2, [5, 6], max_tokens=12)
    engine.add(3, [5, 6], constraint=FakeConstraint(9, fails_at=4), max_tokens=12)
    engine.run()
    assert engine.tokens[0, 0] == short.taken == expected_tokens([1, 2], 5)
    assert engine.tokens[0, 1] == long.taken == expected_tokens([3, 4], 9)
    assert engine.tokens[0, 2] == expected_tokens([5, 6], 12)
    assert [failure.number for failure in engine.core.take_failures()] == [3]


def test_a_longer_prompt_hits_the_full_blocks_of_an_earlier_request(make):
    engine = make()
    engine.add(0, [1, 2, 3], max_tokens=10)
    engine.run()
    engine.add(1, [1, 2, 3, *engine.tokens[0, 0], 9], max_tokens=3)
    engine.run()
    # The last token of an output is not computed: 12 of the 13 are in full blocks.
    assert engine.core.scheduler.stats.prefix_hit_tokens == 12
    assert engine.tokens[0, 1] == expected_tokens([1, 2, 3, *engine.tokens[0, 0], 9], 3)


@pytest.mark.parametrize("num_steps", range(1, 24))
def test_a_block_is_cached_as_soon_as_its_last_token_is_known(make, num_steps):
    engine = make(num_blocks=64)
    engine.add(0, [1, 2, 3], max_tokens=40)
    for _ in range(num_steps):
        engine.step()
    known = [1, 2, 3, *engine.tokens.get((0, 0), ())]
    engine.add(1, [*known, 9], max_tokens=1)
    engine.step()
    assert engine.core.scheduler.stats.prefix_hit_tokens == len(known) // 4 * 4


@pytest.mark.parametrize("level", [0, 1, 2])
def test_sleep_first_applies_the_step_in_flight(make, level):
    engine = make()
    engine.add(0, [1, 2, 3], max_tokens=12)
    for _ in range(4):
        engine.step()
    engine.call(Method.SLEEP, {"level": level, "mode": "keep"})
    assert not engine.core.is_in_flight
    num_tokens = len(engine.tokens[0, 0])
    assert num_tokens == 4
    engine.step()
    assert len(engine.tokens[0, 0]) == num_tokens
    engine.call(Method.WAKE_UP)
    engine.runner.memory.num_missing = 0
    engine.core.weights_written()
    engine.run()
    assert engine.tokens[0, 0] == expected_tokens([1, 2, 3], 12)


def test_a_pause_lets_the_step_in_flight_end(make):
    engine = make()
    engine.add(0, [1, 2, 3], max_tokens=12)
    for _ in range(3):
        engine.step()
    engine.core.pause(0, PauseMode.KEEP)
    engine.step()
    assert not engine.core.is_in_flight
    assert len(engine.tokens[0, 0]) == 3
    engine.core.resume(0)
    engine.run()
    assert engine.tokens[0, 0] == expected_tokens([1, 2, 3], 12)


def random_engine(rng, lag):
    return Engine(
        lag,
        num_blocks=rng.choice((16, 24, 200)),
        budget=rng.choice((8, 64)),
        num_seqs=rng.choice((2, 6)),
        policy=rng.choice(("fcfs", "priority")),
    )


def random_request(rng, engine, number, wanted):
    """Add a random request, and its expected tokens to `wanted`."""
    client = rng.randrange(3)
    prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
    if rng.random() < 0.1:
        engine.pool(number, prompt)
        wanted[0, number] = []
        return
    most = rng.choice((1, 2, 5, 20))
    options = {"max_tokens": most, "min_tokens": rng.choice((0, 0, most))}
    if rng.random() < 0.3:
        options["stop_token_ids"] = rng.sample(range(50), 12)
    if rng.random() < 0.2:
        options["prompt_logprobs"] = 1
    if rng.random() < 0.2:
        options["logprobs"] = 2
    constraint = FakeConstraint(rng.randrange(1, 8)) if rng.random() < 0.2 else None
    priority = rng.randrange(3)
    engine.add(number, prompt, client=client, constraint=constraint, priority=priority, **options)
    tokens = expected_tokens(
        prompt,
        most,
        stop_ids=options.get("stop_token_ids", ()),
        min_tokens=options["min_tokens"],
    )
    wanted[client, number] = tokens if constraint is None else tokens[: constraint._length]
    if "prompt_logprobs" in options:
        engine.prompt_positions.setdefault((client, number), [])


def disturb(rng, engine, wanted):
    kind = rng.random()
    if kind < 0.3 and wanted:
        client, number = rng.choice(list(wanted))
        if (client, number) not in engine.ends:
            engine.abort(number, client)
    elif kind < 0.5:
        client = rng.randrange(3)
        engine.core.scheduler.pause_client(client)
        for _ in range(3):
            engine.step()
        engine.core.scheduler.resume_client(client)
    elif kind < 0.7:
        engine.call(Method.RESET_PREFIX_CACHE, rng.random() < 0.5)
    elif kind < 0.8:
        engine.call(Method.SLEEP, {"level": rng.choice(list(LEVELS)), "mode": "keep"})
        engine.call(Method.WAKE_UP)
        engine.runner.memory.num_missing = 0
        engine.core.weights_written()
    else:
        engine.core.settle()
        engine.take(engine.core.take_outputs())


@pytest.mark.parametrize("run_after_steps", [1, 4])
@pytest.mark.parametrize("seed", range(25))
def test_random_requests_get_the_tokens_of_solo_runs(monkeypatch, seed, run_after_steps):
    monkeypatch.setattr(steady_decode, "STEADY_AFTER_STEPS", run_after_steps)
    rng = random.Random(seed)
    engine = random_engine(rng, lambda: rng.randrange(3))
    wanted = {}
    for number in range(40):
        random_request(rng, engine, number, wanted)
        for _ in range(rng.randrange(6)):
            engine.step()
            engine.core.scheduler.check_integrity()
        if rng.random() < 0.4:
            disturb(rng, engine, wanted)
    engine.run()
    assert not engine.core.take_failures()
    assert engine.ends.keys() == wanted.keys()
    for key, tokens in wanted.items():
        got = engine.tokens[key]
        if engine.ends[key] is FinishReason.ABORT:
            assert got == tokens[: len(got)]
        else:
            assert got == tokens
    for positions in engine.prompt_positions.values():
        assert positions == list(range(1, 1 + len(positions)))


@pytest.mark.parametrize("paused", [0, 1])
def test_only_some_requests_have_a_token_in_flight(make, monkeypatch, paused):
    monkeypatch.setattr(steady_decode, "STEADY_AFTER_STEPS", 1)
    engine = make(num_blocks=64)
    for client, length in ((0, 20), (1, 8), (2, 12)):
        engine.add(0, [client + 1] * 5, client=client, max_tokens=length)
    for _ in range(3):
        engine.step()
    engine.core.scheduler.pause_client(paused)
    for _ in range(2):
        engine.step()
    engine.core.scheduler.resume_client(paused)
    engine.run()
    for client, length in ((0, 20), (1, 8), (2, 12)):
        assert engine.tokens[client, 0] == expected_tokens([client + 1] * 5, length)
    assert sum(len(plan.samples) for plan in engine.runner.plans) == 20 + 8 + 12
