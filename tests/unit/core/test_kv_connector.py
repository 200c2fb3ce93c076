"""The scheduler's part of KV connectors: what is loaded, what is saved, and what a failure ends."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
from support.fakes import FakeRunner, expected_tokens, info

from shmllm.config.engine import SchedulerConfig
from shmllm.core.kv_cache_manager import KVCacheManager
from shmllm.core.kv_connector import SchedulerConnector
from shmllm.core.request import Request
from shmllm.core.scheduler import Scheduler
from shmllm.errors import RequestError
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.plugins.kv_connector import ConnectorContext, KVConnector, StepView

SIZE = 4
PROMPT = list(range(1, 15))


class Tier(KVConnector):
    """Keeps the fingerprints of blocks by their hash.

    Attributes:
        has: what was saved.
        answer: what `get_num_new_matched_tokens` returns or raises instead; None: nothing else.
        answers: what the other methods return or raise.
        steps: the steps that were described.
    """

    def __init__(self) -> None:
        super().__init__(ConnectorContext({}, "kv_both", "", SIZE))
        self.has: dict[bytes, list[int]] = {}
        self.answer: Any = None
        self.answers: dict[str, Any] = {}
        self.asked: list[tuple[int, int]] = []
        self.ended: list[tuple[int, list[int]]] = []
        self.steps: list[StepView] = []
        self._loads: list[tuple[int, bytes]] = []
        self._first: dict[str, int] = {}

    def _answer(self, method: str, usual: Any = None) -> Any:
        answer = self.answers.get(method, usual)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.asked.append((request.number, num_computed_tokens))
        first = num_computed_tokens // SIZE
        most = (request.num_tokens - 1) // SIZE
        end = first
        while end < most and request.block_hashes[end] in self.has:
            end += 1
        self._first[request.request_id] = first
        return self._answer("get_num_new_matched_tokens", ((end - first) * SIZE, False))

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self._answer("update_state_after_alloc")
        first = self._first.pop(request.request_id, 0)
        end = first + num_external_tokens // SIZE
        self._loads += zip(blocks[first:end], request.block_hashes[first:end], strict=True)

    def build_connector_meta(self, plan):
        loads, self._loads = self._loads, []
        self.steps.append(plan)
        assert plan.scheduled
        self._answer("build_connector_meta")
        return loads, plan.complete

    def request_finished(self, request, block_ids):
        self.ended.append((request.number, block_ids))
        return self._answer("request_finished", (False, None))

    def register_kv_caches(self, kv_caches): ...

    def start_load_kv(self, metadata): ...

    def wait_for_layer_load(self, layer_name): ...

    def save_kv_layer(self, layer_name, kv_layer, metadata): ...

    def wait_for_save(self): ...


class Engine:
    """A scheduler with a tier and a fake runner, which has `lag` steps in flight."""

    def __init__(self, tier=None, *, role="kv_both", num_blocks=32, lag=0, num_seqs=8):
        self.tier = tier or Tier()
        self.problems: list[str] = []
        self.kv_cache = KVCacheManager(num_blocks + 1, SIZE, True)
        self.scheduler = Scheduler(
            SchedulerConfig(num_seqs, 64, scheduler_reserve_full_isl=False), self.kv_cache
        )
        self.scheduler.connector = self.connector = SchedulerConnector(
            self.tier, "a:B", role, self.kv_cache, self.problems.append
        )
        self.runner = FakeRunner(info(num_blocks=num_blocks, block_size=SIZE))
        self.lag = lag
        self.in_flight: deque[Any] = deque()
        self.requests: list[Request] = []
        self.load_fails = False
        self._failed_epoch = -1

    def add(self, prompt, max_tokens=4, **options):
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        number = len(self.requests)
        submitted = EngineCoreRequest(number, prompt, params, **options)
        request = Request(0, submitted, seed=0, max_model_len=64)
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def execute(self, plan):
        """What the worker does: see `worker.kv_connector`."""
        step = plan.external
        slots = self.runner._slots
        failure = step.error if step.loaded else ""
        if step.loaded and self.load_fails:
            failure = "the KV connector a:B failed in start_load_kv: no"
        loads, saves = step.metadata or ((), ())
        if not failure:
            assert sorted(block_id for block_id, _ in loads) == sorted(step.loaded)
        for block_id, block_hash in loads:
            found = [0] * SIZE if failure else self.tier.has[block_hash]
            for place in range(SIZE):
                slots[block_id * SIZE + place] = found[place]
        for block_id in step.loaded if failure else ():
            for place in range(SIZE):
                slots[block_id * SIZE + place] = 0
        result = self.runner.execute(plan)
        result.load_failure = failure
        if failure:
            self._failed_epoch = step.epoch
        elif step.epoch != self._failed_epoch:
            for block in saves:
                begin = block.block_id * SIZE
                self.tier.has[block.block_hash] = [slots[begin + i] for i in range(SIZE)]
        return result

    def step(self):
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan.num_tokens:
            self.in_flight.append((plan, self.execute(plan)))
        if self.in_flight and (len(self.in_flight) > self.lag or not plan.num_tokens):
            self.scheduler.apply(*self.in_flight.popleft())
            self.scheduler.check_integrity()

    def run(self):
        while self.scheduler.has_unfinished() or self.in_flight:
            self.step()

    def run_one(self, prompt, **options):
        """Run a request alone. Returns the number of its cached tokens, and its output."""
        request = self.add(prompt, **options)
        self.run()
        return request.num_cached_tokens, list(request.token_ids[len(prompt) :])

    def error_of(self, request):
        return {each.number: each.message for each in self.scheduler.failures}.get(request.number)

    def assert_right(self, request):
        """The tokens that it got are right."""
        prompt = list(request.token_ids[: request.num_prompt_tokens])
        output = list(request.token_ids[request.num_prompt_tokens :])
        assert output == expected_tokens(prompt, request.max_tokens)[: len(output)]


def test_another_engine_loads_what_one_has_saved():
    tier = Tier()
    first = Engine(tier).run_one(PROMPT)
    assert first == (0, expected_tokens(PROMPT, 4))
    assert len(tier.has) == 4  # the last one has tokens of the output
    second = Engine(tier)
    assert second.run_one(PROMPT) == (12, first[1])
    assert second.scheduler.stats.prefix_hit_tokens == 12
    complete = [block for step in tier.steps for block in step.complete]
    assert len(complete) == 4 + 1  # what was loaded is not saved again
    assert second.run_one(PROMPT)[0] == 12
    assert tier.asked == [(0, 0), (0, 0)]  # there was nothing to ask for the third time


def test_the_local_hit_comes_first_and_the_last_token_is_computed():
    engine = Engine()
    engine.run_one(PROMPT[:8])
    engine.run_one(PROMPT)
    assert engine.tier.asked == [(0, 0), (1, 8)]
    engine.run_one(PROMPT[:9])  # nothing is left to ask for
    assert engine.tier.asked == [(0, 0), (1, 8)]


def test_requests_of_the_same_step_read_the_loaded_blocks():
    tier = Tier()
    Engine(tier).run_one(PROMPT)
    engine = Engine(tier)
    requests = [engine.add(PROMPT), engine.add([*PROMPT, 3])]
    engine.step()
    assert [each.num_cached_tokens for each in requests] == [12, 12]
    engine.run()
    for each in requests:
        engine.assert_right(each)
    assert tier.asked == [(0, 0), (0, 0)]


def test_salts_and_requests_that_read_no_cache_are_not_mixed():
    tier = Tier()
    Engine(tier).run_one(PROMPT)
    engine = Engine(tier)
    assert engine.run_one(PROMPT, cache_salt="other")[0] == 0
    asked = len(tier.asked)
    params = SamplingParams(max_tokens=2, skip_reading_prefix_cache=True)
    request = Request(0, EngineCoreRequest(9, PROMPT, params), seed=0, max_model_len=64)
    engine.scheduler.add(request)
    engine.run()
    assert (request.num_cached_tokens, len(tier.asked)) == (0, asked)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_roles(role):
    tier = Tier()
    Engine(tier).run_one(PROMPT)
    saved = dict(tier.has)
    engine = Engine(tier, role=role)
    assert engine.run_one(PROMPT)[0] == (12 if role == "kv_consumer" else 0)
    tier.has.clear()
    engine.run_one([40, *PROMPT])
    assert bool(tier.has) == (role == "kv_producer")
    assert saved


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((8, True), "returned True: loading between steps is not supported"),
        ((6, False), "returned 6: it must be a multiple of 4 from 0 to 12"),
        ((16, False), "returned 16: it must be a multiple of 4 from 0 to 12"),
        ((-4, False), "returned -4"),
        ((None, False), "returned None"),
        (8, "must return (number of tokens, False), got 8"),
        (ValueError("no"), "failed in get_num_new_matched_tokens: ValueError: no"),
    ],
)
def test_a_wrong_number_of_tokens_ends_the_request(answer, words):
    engine = Engine()
    engine.tier.answers["get_num_new_matched_tokens"] = answer
    request = engine.add(PROMPT)
    engine.run()
    assert words in engine.error_of(request)
    engine.tier.answers.clear()
    assert engine.run_one(PROMPT)[1] == expected_tokens(PROMPT, 4)
    assert engine.tier.ended[0] == (0, [])


def test_a_failed_admission_frees_the_blocks():
    engine = Engine()
    engine.tier.answers["update_state_after_alloc"] = KeyError("no")
    request = engine.add(PROMPT)
    engine.step()
    assert "failed in update_state_after_alloc: KeyError" in engine.error_of(request)
    assert not engine.kv_cache.has_used_blocks
    assert len(engine.kv_cache.prefix_cache) == 0


@pytest.mark.parametrize("answer", [(True, None), (False, {"a": 1}), None, ValueError("no")])
def test_what_request_finished_cannot_do_is_reported_once(answer):
    engine = Engine()
    engine.tier.answers["request_finished"] = answer
    for _ in range(2):
        assert engine.run_one(PROMPT)[1] == expected_tokens(PROMPT, 4)
    (problem,) = engine.problems
    assert "request_finished" in problem
    assert engine.tier.ended[0] == (0, [1, 2, 3, 4, 5])
    assert not engine.kv_cache.has_used_blocks


def test_a_step_without_a_description_loads_nothing():
    tier = Tier()
    Engine(tier).run_one(PROMPT)
    engine = Engine(tier)
    tier.answers["build_connector_meta"] = ValueError("no")
    request = engine.add(PROMPT)
    engine.run()
    assert "failed in build_connector_meta: ValueError: no" in engine.error_of(request)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_failed_load_ends_its_readers_and_leaves_no_block(lag):
    tier = Tier()
    Engine(tier).run_one(PROMPT)
    engine = Engine(tier, lag=lag)
    old = engine.add([30, 31, 32, 33, 34], max_tokens=1)
    engine.run()
    saved = set(tier.has)
    engine.load_fails = True
    readers = [engine.add(PROMPT, 12), engine.add([*PROMPT, 9], 12)]
    other = engine.add([20] * 10, max_tokens=12)
    engine.step()
    if lag:
        late = engine.add([*PROMPT, 8, 8, 8, 8, 8])
        readers.append(late)
        engine.step()
    for each in readers:
        assert "failed in start_load_kv: no" in engine.error_of(each)
        assert each.num_output_tokens == 0
    engine.load_fails = False
    engine.run()
    engine.assert_right(other)
    assert other.num_output_tokens == 12
    assert engine.run_one(list(old.token_ids[:5]))[0] == 4  # older blocks stay
    assert engine.run_one(PROMPT) == (12, expected_tokens(PROMPT, 4))
    for each in readers:
        prompt = list(each.token_ids)
        assert Engine(tier).run_one(prompt)[1] == expected_tokens(prompt, 4), "wrong blocks saved"
    assert len(tier.has) > len(saved) + 4  # saving goes on


def test_a_failed_load_ends_a_reader_that_was_preempted_meanwhile():
    tier = Tier()
    Engine(tier).run_one(PROMPT)
    engine = Engine(tier, lag=1)
    readers = [engine.add(PROMPT), engine.add(PROMPT)]
    waiting = engine.add(PROMPT)
    engine.scheduler.abort(0, waiting.number)
    engine.load_fails = True
    engine.step()
    engine.scheduler.preempt_all()
    waiting = engine.add(PROMPT)
    engine.load_fails = False
    engine.scheduler.apply(*engine.in_flight.popleft())
    for each in readers:
        assert "failed in start_load_kv: no" in engine.error_of(each)
        assert each.num_output_tokens == 0
    engine.run()
    engine.assert_right(waiting)
    assert waiting.num_output_tokens == 4


def test_nothing_is_asked_or_saved_while_it_is_off():
    engine = Engine()
    engine.connector.is_on = False
    engine.execute = engine.runner.execute
    engine.run_one(PROMPT)
    assert not engine.tier.asked
    assert not engine.tier.steps


def test_an_error_has_the_type_that_ends_a_request():
    engine = Engine()
    engine.tier.answers["get_num_new_matched_tokens"] = ValueError("no")
    with pytest.raises(RequestError):
        engine.connector.num_loadable(engine.add(PROMPT), 0)


@pytest.mark.parametrize("seed", range(12))
def test_random_runs_give_right_tokens(seed):
    """Few blocks, preemptions, aborts, failed loads and steps in flight."""
    draw = random.Random(seed)
    tier = Tier()
    for _ in range(3):
        engine = Engine(tier, num_blocks=draw.choice([12, 20]), lag=draw.choice([0, 1]))
        for _ in range(60):
            if draw.random() < 0.4:
                family = draw.randrange(3)
                prompt = [family * 10 + i % 9 for i in range(draw.randint(3, 24))]
                engine.add([*prompt, draw.randrange(3)], draw.randint(1, 16))
            if engine.requests and draw.random() < 0.1:
                engine.scheduler.abort(0, draw.choice(engine.requests).number)
            engine.load_fails = draw.random() < 0.1
            engine.step()
        engine.load_fails = False
        engine.run()
        for each in engine.requests:
            engine.assert_right(each)
        assert not engine.kv_cache.has_used_blocks
        ended = [number for number, _ in tier.ended]
        assert sorted(ended) == list(range(len(engine.requests)))
        tier.ended.clear()
    for slots in tier.has.values():
        assert 0 not in slots
