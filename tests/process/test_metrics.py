"""The statistics page is up to date, also when no step follows."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from support.engines import STEP_S, is_idle, slow_steps
from support.waiting import PATIENCE_S, holds_within

from shmllm import LLM, SamplingParams

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as llm:
        yield llm


def test_counters_count(llm: LLM) -> None:
    before = llm.get_metrics()
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    outputs = llm.generate(["import os", "import sys"], params, use_tqdm=False)
    expected = {
        "requests_finished": 2,
        "generated_tokens": 10,
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
    }

    def counted() -> dict[str, int]:
        return {name: llm.get_metrics()[name] - before[name] for name in expected}

    assert holds_within(lambda: counted() == expected, PATIENCE_S), counted()
    assert holds_within(lambda: is_idle(llm), PATIENCE_S), llm.get_metrics()


def test_a_steps_time_is_split_into_its_phases(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    with slow_steps(llm):
        before = llm.get_metrics()
        llm.generate("import os", params, use_tqdm=False)
        after = llm.get_metrics()
    phases = ("drain", "schedule", "prepare", "execute", "sample", "apply", "publish")
    spent = {phase: after[f"{phase}_ns"] - before[f"{phase}_ns"] for phase in phases}
    assert min(spent.values()) > 0
    assert spent["execute"] > 9 * STEP_S * 1e9  # the last step's are counted behind its outputs


def test_gauges_return_to_zero_after_an_abort(llm: LLM) -> None:
    """A front end that leaves early aborts its request; no step follows."""
    params = SamplingParams(max_tokens=900, ignore_eos=True)
    for changed in llm.front_end.serve(llm.front_end.prepare(["import os"], params)):
        if changed:
            break
    assert holds_within(lambda: is_idle(llm), PATIENCE_S), llm.get_metrics()


def test_the_timestamps_of_a_request_are_in_order(llm: LLM) -> None:
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    began = time.monotonic()
    outputs = llm.generate(["import os\n" * 30] * 2, params, use_tqdm=False)
    for output in outputs:
        metrics = output.metrics
        assert metrics is not None
        moments = [
            began,
            metrics.arrival_time,
            metrics.queued_time,
            metrics.scheduled_time,
            metrics.first_token_time,
            metrics.last_token_time,
            time.monotonic(),
        ]
        assert moments == sorted(moments)
        assert len(set(moments)) == len(moments)
        assert metrics.num_preemptions == 0
        assert metrics.num_cached_tokens == output.num_cached_tokens
        assert metrics.first_token_latency > 0


def test_preemptions_are_counted_for_each_request() -> None:
    with LLM(kv_cache_memory_bytes=2**21, max_num_seqs=64, multiprocess=False) as small:
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        prompts = [f"x = {n}" for n in range(16)]
        outputs = small.generate(prompts, params, use_tqdm=False)
        counts = [output.metrics.num_preemptions for output in outputs]  # type: ignore[union-attr]
        counters = small.get_metrics()
    assert sum(counts) == counters["preemptions"] > 0
    assert counters["prefix_hit_tokens"] == 0
