"""Reporter: the contents of the control page after made-up steps."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic_ns

import pytest
from support.fakes import FakeRunner, info

from shmllm.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from shmllm.config.load import LoadConfig
from shmllm.engine.core import EngineCore
from shmllm.engine.reporter import Reporter
from shmllm.engine.step_timings import StepTimings
from shmllm.ipc.control import ControlPage, ControlView
from shmllm.ipc.histogram import bucket_of
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import EngineState, SegmentKind
from shmllm.ipc.stats import Histogram, Mark, Stat, StepField
from shmllm.outputs.columns import OutputColumns

MS = 1_000_000
BEGIN = 5_000 * MS


@pytest.fixture
def control(tmp_path) -> Iterator[Segment]:
    with Segment.create(SegmentKind.CONTROL) as control:
        yield control


@pytest.fixture
def view(control: Segment) -> ControlView:
    return ControlView(control)


@pytest.fixture
def reporter(control: Segment) -> Reporter:
    return Reporter(ControlPage(control))


def tokens(count: int, *queued_ns: int, each: int = 1) -> OutputColumns:
    """The outputs of `count` requests that got `each` tokens."""
    counts, ids = [each] * count, [7] * (count * each)
    return OutputColumns(counts=counts, token_ids=ids, queued_ns=list(queued_ns))


def step(reporter: Reporter, end_ms: int, *outputs: OutputColumns, length_ms: int = 2) -> None:
    """Report a step that ended at `end_ms`: publishing took 0.5 ms and scheduling 0.1 ms."""
    end = BEGIN + end_ms * MS
    began, stepped = end - length_ms * MS, end - MS // 2
    timings = StepTimings(num_tokens=70, num_requests=65, num_draft_tokens=5, num_accepted_tokens=3)
    timings.moments_ns = (began, began + MS // 10, *[stepped] * 4)
    reporter.step(timings, stepped, end, dict(enumerate(outputs)))


def make_core(**facts: object) -> EngineCore:
    config = EngineConfig(LoadConfig("nowhere"), CacheConfig(), SchedulerConfig(8, 64))
    return EngineCore(config, FakeRunner(info(**facts)))


def counts(view: ControlView, histogram: Histogram) -> dict[int, int]:
    """The number of durations in each bucket that is not empty."""
    found = view.durations(histogram).counts
    return {bucket: count for bucket, count in enumerate(found) if count}


def test_each_step_is_counted_with_its_length(reporter: Reporter, view: ControlView) -> None:
    step(reporter, 2)
    step(reporter, 10, length_ms=5)
    assert counts(view, Histogram.STEP) == {bucket_of(2 * MS): 1, bucket_of(5 * MS): 1}
    assert view.stat(Stat.STEP_NS) == 5 * MS


def test_ttft_counts_from_the_arrival_of_the_request(reporter: Reporter, view: ControlView) -> None:
    step(reporter, 20, tokens(2, BEGIN, BEGIN + 10 * MS), tokens(1, BEGIN + 15 * MS))
    expected = {bucket_of(20 * MS): 1, bucket_of(10 * MS): 1, bucket_of(5 * MS): 1}
    assert counts(view, Histogram.TTFT) == expected
    assert view.durations(Histogram.ITL).count == 0


def test_itl_counts_from_the_last_step_with_tokens(reporter: Reporter, view: ControlView) -> None:
    step(reporter, 20, tokens(64, *[BEGIN] * 64))
    step(reporter, 23)  # a chunk of a prompt, without a token
    step(reporter, 26, tokens(60), tokens(5, BEGIN + 20 * MS))
    assert counts(view, Histogram.ITL) == {bucket_of(6 * MS): 64}
    step(reporter, 30, tokens(3))
    assert counts(view, Histogram.ITL) == {bucket_of(6 * MS): 64, bucket_of(4 * MS): 3}


def test_a_gap_between_requests_does_not_count_as_latency(
    reporter: Reporter, view: ControlView
) -> None:
    step(reporter, 2, tokens(1, BEGIN))
    step(reporter, 9_000, tokens(1, BEGIN + 8_990 * MS))
    assert view.durations(Histogram.ITL).count == 0
    assert max(counts(view, Histogram.TTFT)) == bucket_of(10 * MS)


def test_the_marks_of_the_start_are_in_order(control: Segment, view: ControlView) -> None:
    assert [view.mark_ns(mark) for mark in Mark] == [0, 0, 0]
    began = monotonic_ns()
    reporter = Reporter(ControlPage(control))
    reporter.imported("small")
    assert view.mark_ns(Mark.READY) == 0
    assert (view.model(), view.engine_state) == ("small", EngineState.STARTING)
    reporter.ready(make_core(device="a card", speculative_method="ngram", num_speculative_tokens=8))
    assert (view.device(), view.engine_state) == ("a card", EngineState.READY)
    assert (view.precision(), view.speculation()) == ("float32", "ngram, up to 8")
    moments = [began, *[view.mark_ns(mark) for mark in Mark], monotonic_ns()]
    assert moments == sorted(moments)


def test_publishing_times_are_added_up(reporter: Reporter) -> None:
    step(reporter, 2)
    step(reporter, 4)
    assert reporter.publish_ns == MS


def test_each_step_is_logged(reporter: Reporter, view: ControlView) -> None:
    reporter.drain_ns = 700
    step(reporter, 20, tokens(2, BEGIN))
    reporter.drain_ns = 1_500
    step(reporter, 25, tokens(3), length_ms=4)
    steps = view.step_log().read()
    assert steps.fields[:, StepField.BEGAN_NS].tolist() == [BEGIN + 18 * MS, BEGIN + 21 * MS]
    assert steps.fields[:, StepField.DRAIN_NS].tolist() == [700, 800]
    assert steps.fields[:, StepField.SCHEDULE_NS].tolist() == [MS // 10] * 2
    assert steps.fields[:, StepField.PREPARE_NS].tolist() == [MS * 14 // 10, MS * 34 // 10]
    assert steps.fields[:, StepField.PUBLISH_NS].tolist() == [MS // 2] * 2
    assert steps.fields[:, StepField.NUM_TOKENS].tolist() == [70, 70]
    assert steps.fields[:, StepField.NUM_REQUESTS].tolist() == [65, 65]
    assert steps.fields[:, StepField.NUM_SAMPLED].tolist() == [2, 3]
    assert steps.fields[:, StepField.NUM_FIRST].tolist() == [1, 0]
    assert steps.fields[:, StepField.NUM_DRAFT_TOKENS].tolist() == [5, 5]
    assert steps.fields[:, StepField.NUM_ACCEPTED_TOKENS].tolist() == [3, 3]


def test_tokens_that_come_together_count_as_one_latency(
    reporter: Reporter, view: ControlView
) -> None:
    step(reporter, 20, tokens(3, BEGIN, BEGIN, BEGIN))
    step(reporter, 26, tokens(3, each=4))
    assert counts(view, Histogram.ITL) == {bucket_of(6 * MS): 3}


def test_accepted_tokens_are_written_by_their_place(reporter: Reporter, view: ControlView) -> None:
    core = make_core(speculative_method="ngram", num_speculative_tokens=3)
    core.scheduler.stats.add_draft(3, 2)
    core.scheduler.stats.add_draft(2, 1)
    reporter.ready(core)
    reporter.write_state(core)
    stats = view.stats()
    assert (stats["drafts"], stats["draft_tokens"], stats["accepted_tokens"]) == (2, 5, 3)
    assert [stats[f"accepted_at_{place}"] for place in range(3)] == [2, 1, 0]
    assert "accepted_at_3" not in stats
