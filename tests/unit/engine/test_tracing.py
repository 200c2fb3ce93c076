"""EngineTracer: the records of an engine core with a fake runner, and their request spans."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.fakes import FakeRunner, expected_tokens, info

from shmllm.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from shmllm.config.load import LoadConfig
from shmllm.core.observer import NULL_OBSERVER
from shmllm.core.plan import StepPlan
from shmllm.core.request import Request
from shmllm.engine.core import EngineCore
from shmllm.engine.tracer import EngineTracer
from shmllm.params.pooling import Pooling, PoolingType
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.tracing.directory import OwnedDirectory, Settings, SharedDirectory
from shmllm.tracing.layout import Event, Type
from shmllm.tracing.reading import Recording, read
from shmllm.tracing.recorder import Recorder
from shmllm.tracing.request_spans import RequestSpan, request_spans_of
from shmllm.tracing.steps import PHASES, steps_of

CONNECTION = 77
PLACE = 3


@dataclass
class Traced:
    """A traced core, with requests of the front end CONNECTION in the place PLACE."""

    core: EngineCore
    recorder: Recorder

    def run(self) -> dict[int, list[int]]:
        """Step until all requests have ended. Returns the tokens by request number."""
        tokens: dict[int, list[int]] = {}
        for _ in range(500):
            if not self.core.scheduler.has_unfinished():
                return tokens
            for columns in self.core.step().values():
                for number, token in zip(columns.numbers, columns.token_ids, strict=False):
                    tokens.setdefault(number, []).append(token)
        raise AssertionError("requests never ended")

    def recording(self) -> Recording:
        recording = read(self.recorder.path)
        assert recording is not None
        return recording

    def spans(self) -> dict[int, RequestSpan]:
        recording = self.recording()
        end_ns = max(record.end_ns for record in recording.records)
        spans = request_spans_of([recording], 0, end_ns)
        found = {span.number: span for span in spans}
        assert len(found) == len(spans), "a request has two spans"
        return found


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Traced]]:
    owned = OwnedDirectory(Settings(), tmp_path)
    recorders = []

    def make(*, budget: int = 64, num_seqs: int = 8, traced: bool = True, **changes: int) -> Traced:
        config = EngineConfig(
            LoadConfig("nowhere"),
            CacheConfig(),
            SchedulerConfig(num_seqs, budget, scheduler_reserve_full_isl=False),
        )
        core = EngineCore(config, FakeRunner(info(**changes)))
        recorder = Recorder(SharedDirectory(owned.path), {})
        recorders.append(recorder)
        recorder.add(Type.EVENT, Event.JOINED, 1, 1, PLACE, CONNECTION, os.getpid())
        if traced:
            core.observer = EngineTracer(recorder, core)
        return Traced(core, recorder)

    yield make
    for recorder in recorders:
        recorder.end()
    owned.close()


def names(span: RequestSpan) -> list[str]:
    return [stage.name for stage in span.stages]


def chunks(span: RequestSpan) -> list[tuple[int, int]]:
    return [(s.facts["from"], s.facts["tokens"]) for s in span.stages if s.name == "prefill"]


def test_an_engine_without_a_trace_has_the_null_observer() -> None:
    config = EngineConfig(LoadConfig("nowhere"), CacheConfig(), SchedulerConfig(8, 64))
    assert EngineCore(config, FakeRunner(info())).observer is NULL_OBSERVER


def test_the_stages_of_a_request(make: Callable[..., Traced]) -> None:
    traced = make()
    traced.core.add(PLACE, EngineCoreRequest(5, [1, 2, 3], SamplingParams(max_tokens=4)))
    assert traced.run() == {5: expected_tokens([1, 2, 3], 4)}
    span = traced.spans()[5]
    assert names(span) == ["queued", "prefill", "first token", "decode", "finished"]
    assert (span.connection, span.reason, span.is_whole) == (CONNECTION, "length", True)
    assert (span.num_prompt_tokens, span.num_output_tokens) == (3, 4)
    assert span.num_cached_tokens == 0


def test_a_long_prompt_has_several_chunks(make: Callable[..., Traced]) -> None:
    traced = make(budget=4)
    traced.core.add(PLACE, EngineCoreRequest(0, list(range(1, 11)), SamplingParams(max_tokens=1)))
    traced.run()
    span = traced.spans()[0]
    assert names(span) == ["queued", *["prefill"] * 3, "first token", "finished"]
    assert chunks(span) == [(0, 4), (4, 4), (8, 2)]


def test_drafted_tokens_are_no_prefill(make: Callable[..., Traced]) -> None:
    traced = make()
    request = Request(
        PLACE, EngineCoreRequest(5, [1, 2, 3], SamplingParams()), max_model_len=64, seed=0
    )
    request.num_computed_tokens = 6
    plan = StepPlan(step=1)
    plan.add_tokens(request, 3, [8, 9])
    traced.core.observer.stepped(plan, (10, 20, 30, 40, 50, 60))
    records = traced.recording().records
    assert not [each for each in records if (each.type, each.name) == (Type.EVENT, Event.PREFILL)]
    step = steps_of(records)[1]
    assert (step.num_tokens, step.num_draft_tokens) == (3, 2)


def test_a_prefix_hit_is_not_computed(make: Callable[..., Traced]) -> None:
    traced = make()
    for number in (0, 1):
        traced.core.add(
            PLACE, EngineCoreRequest(number, list(range(1, 11)), SamplingParams(max_tokens=2))
        )
        traced.run()
    span = traced.spans()[1]
    assert span.num_cached_tokens == 8
    assert chunks(span) == [(8, 2)]


def test_the_stages_of_preempted_requests(make: Callable[..., Traced]) -> None:
    traced = make(num_blocks=9, budget=16)
    prompts = {n: [n + 1] * 7 for n in range(4)}
    for number, prompt in prompts.items():
        traced.core.add(PLACE, EngineCoreRequest(number, prompt, SamplingParams(max_tokens=9)))
    tokens = traced.run()
    spans = traced.spans()
    assert {n: span.num_output_tokens for n, span in spans.items()} == {
        n: len(tokens[n]) for n in prompts
    }
    num_preempted = sum(span.num_preemptions for span in spans.values())
    assert num_preempted == traced.core.scheduler.stats.preemptions > 0
    for span in spans.values():
        assert names(span).count("preempted") == span.num_preemptions
        assert names(span).count("first token") == 1
        assert span.is_whole
        ends = [start + count for start, count in chunks(span)]
        assert span.num_prompt_tokens in ends or span.num_preemptions


def test_the_stages_of_an_aborted_request(make: Callable[..., Traced]) -> None:
    traced = make(num_seqs=1)
    for number in (0, 1):
        traced.core.add(PLACE, EngineCoreRequest(number, [1, 2], SamplingParams(max_tokens=50)))
    traced.core.step()
    traced.core.abort(PLACE, [0, 1])
    spans = traced.spans()
    assert [spans[n].reason for n in (0, 1)] == ["abort", "abort"]
    assert names(spans[0]) == ["queued", "prefill", "first token", "decode", "finished"]
    assert names(spans[1]) == ["queued", "finished"]


def test_a_rejected_request_has_only_an_end(make: Callable[..., Traced]) -> None:
    traced = make()
    assert traced.core.add(PLACE, EngineCoreRequest(0, [99], SamplingParams())) is not None
    traced.core.observer.rejected(PLACE, 0)
    span = traced.spans()[0]
    assert (names(span), span.reason) == (["finished"], "error")


def test_a_pooling_request_has_no_tokens(make: Callable[..., Traced]) -> None:
    traced = make(budget=4)
    pooling = Pooling(PoolingType.MEAN, normalize=False)
    traced.core.add(PLACE, EngineCoreRequest(0, [1, 2, 3, 4, 5, 6], pooling))
    traced.run()
    span = traced.spans()[0]
    assert chunks(span) == [(0, 4), (4, 2)]
    assert (span.reason, span.num_output_tokens) == ("stop", 0)
    assert "decode" not in names(span)


def test_requests_added_before_the_trace_are_in_it(make: Callable[..., Traced]) -> None:
    traced = make(traced=False, num_seqs=1)
    for number in (0, 1):
        traced.core.add(PLACE, EngineCoreRequest(number, [1, 2], SamplingParams(max_tokens=5)))
    traced.core.step()
    tracer = EngineTracer(traced.recorder, traced.core)
    traced.core.observer = tracer
    tracer.record_existing(traced.core)
    traced.run()
    spans = traced.spans()
    assert [spans[n].reason for n in (0, 1)] == ["length", "length"]
    assert names(spans[0]) == ["queued", "decode", "finished"]
    assert names(spans[1]) == ["queued", "prefill", "first token", "decode", "finished"]


def test_each_step_has_its_phases_and_numbers(make: Callable[..., Traced]) -> None:
    traced = make(budget=4)
    traced.core.add(PLACE, EngineCoreRequest(0, [1] * 6, SamplingParams(max_tokens=3)))
    traced.run()
    steps = steps_of(traced.recording().records)
    assert list(steps) == [0, 1, 2, 3]
    assert [step.num_tokens for step in steps.values()] == [4, 2, 1, 1]
    assert [step.running for step in steps.values()] == [1, 1, 1, 0]
    assert [step.blocks for step in steps.values()] == [1, 2, 2, 0]
    for step in steps.values():
        assert [name for name, *_ in step.phases()] == list(PHASES)
        assert all(begin <= end for _, begin, end in step.phases())
