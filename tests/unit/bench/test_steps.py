"""`StepFollower` loses no step, and summaries match numpy's figures."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
from support.fakes import FakeEngineClient

from shmllm.bench.generation import GivenPrompts, Measured, RandomPrompts
from shmllm.bench.steps import StepFollower, is_decode, phases_us, step_us
from shmllm.bench.summary import latency_table, percentiles, phase_table, summary
from shmllm.ipc import layout
from shmllm.ipc.stats import PHASES, StepField
from shmllm.ipc.step_log import StepLogReader, StepLogWriter


def record(number: int) -> list[int]:
    """A step with phases of 1 to 7 microseconds; execute takes `number` milliseconds more."""
    values = [0] * len(StepField)
    for index, phase in enumerate(PHASES):
        values[StepField[f"{phase.upper()}_NS"]] = 1000 * (index + 1)
    values[StepField.EXECUTE_NS] += 1_000_000 * number
    values[StepField.NUM_TOKENS] = values[StepField.NUM_REQUESTS] = 4
    values[StepField.NUM_SAMPLED] = 4
    return values


@pytest.fixture
def log() -> tuple[StepLogWriter, StepLogReader]:
    memory = memoryview(bytearray(layout.CONTROL_END_OFFSET))
    return StepLogWriter(memory), StepLogReader(memory)


def test_a_follower_that_keeps_up_misses_nothing(
    log: tuple[StepLogWriter, StepLogReader],
) -> None:
    writer, reader = log
    writer.add(record(0))
    follower = StepFollower(reader)
    follower.begin()
    total = 3 * layout.NUM_STEP_RECORDS
    for number in range(1, total + 1):
        writer.add(record(number))
        if number % 100 == 0:
            follower.keep_up()
    steps = follower.finish(lambda: total + 1)
    assert steps[:, StepField.EXECUTE_NS].tolist() == [
        record(number)[StepField.EXECUTE_NS] for number in range(1, total + 1)
    ]
    assert follower.num_missed == 0


def test_a_follower_that_reads_too_late_counts_the_missed_steps(
    log: tuple[StepLogWriter, StepLogReader],
) -> None:
    writer, reader = log
    follower = StepFollower(reader)
    follower.begin()
    for number in range(layout.NUM_STEP_RECORDS + 9):
        writer.add(record(number))
    assert len(follower.finish(lambda: 0)) == layout.NUM_STEP_RECORDS - 1
    assert follower.num_missed == 10


def test_a_step_is_the_sum_of_its_phases() -> None:
    steps = np.array([record(0), record(2)])
    assert step_us(steps).tolist() == [28.0, 2028.0]
    assert {phase: v.tolist() for phase, v in phases_us(steps).items()} == {
        phase: [index + 1.0, index + 1.0 + (2000 if phase == "execute" else 0)]
        for index, phase in enumerate(PHASES)
    }


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        (StepField.NUM_TOKENS, 4, True),
        (StepField.NUM_TOKENS, 9, False),  # the step holds a chunk of a prompt
        (StepField.NUM_FIRST, 1, False),  # the step finished a prompt of one token
        (StepField.NUM_SAMPLED, 3, False),
    ],
)
def test_steps_that_only_decode(field: StepField, value: int, expected: bool) -> None:
    values = record(0)
    values[field] = value
    assert is_decode(np.array([values])).tolist() == [expected]


@pytest.mark.parametrize(("tokens", "expected"), [(9, True), (10, False)])
def test_drafted_tokens_are_a_part_of_decoding(tokens: int, expected: bool) -> None:
    values = record(0)
    values[StepField.NUM_TOKENS] = tokens
    values[StepField.NUM_DRAFT_TOKENS] = 5
    values[StepField.NUM_SAMPLED] = 7
    assert is_decode(np.array([values])).tolist() == [expected]


def test_percentiles_are_measured_values() -> None:
    values = [5.0, 1.0, 9.0, 3.0]
    found = percentiles(values)
    assert found == {
        "mean": 4.5,
        "p10": 1.0,
        "p25": 1.0,
        "p50": 3.0,
        "p75": 5.0,
        "p90": 9.0,
        "p99": 9.0,
        "max": 9.0,
    }
    assert set(percentiles([]).values()) == {0.0}


def test_a_summary_takes_rates_of_the_median_batch_and_latencies_of_all() -> None:
    measured = Measured(
        seconds=[1.0, 2.0, 4.0],
        prompt_tokens=[10, 10, 10],
        output_tokens=[100, 100, 100],
        ttft_s=[0.1, 0.2, 0.3],
        steps=[np.array([record(1), record(1), record(5)])],
    )
    found = summary(measured)
    assert found["output_tokens_per_s"] == 50
    assert found["output_tokens_per_s_range"] == [25, 100]
    assert found["total_tokens_per_s"] == 55
    assert found["ttft_ms"]["p50"] == pytest.approx(200)
    assert found["latency_s"]["max"] == 4.0
    assert found["num_steps"] == 3
    assert found["slowest_decode_step_over_median"] == pytest.approx(5.028 / 1.028)
    text = latency_table({"3 requests": found}) + phase_table({"3 requests": found})
    assert "3 requests TTFT" in text
    assert all(phase in text for phase in PHASES)


def test_random_prompts_share_only_their_prefix() -> None:
    llm = SimpleNamespace(facts=FakeEngineClient(1).info)
    prompts = RandomPrompts(random.Random(1), length=8, prefix_length=4)
    batches = [prompts.batch(llm, 3) for _ in range(2)]
    for batch in batches:
        assert len({tuple(p[:4]) for p in batch}) == 1
        assert {len(p) for p in batch} == {12}
    assert len({tuple(p) for batch in batches for p in batch}) == 6


def test_given_prompts_are_repeated_as_often_as_needed() -> None:
    assert GivenPrompts(["a", "b"]).batch(None, 5) == ["a", "b", "a", "b", "a"]
