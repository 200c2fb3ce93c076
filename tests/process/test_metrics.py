"""The statistics page is up to date, also when no step follows."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from support.engines import STEP_S, is_idle, slow_steps
from support.waiting import PATIENCE_S, holds_within

from shmllm import LLM, SamplingParams
from shmllm.compat.vllm_metrics import DRAFT_COUNTERS, Counter, Vector, as_metrics
from shmllm.plugins.stat_logger import statistics

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


@pytest.mark.parametrize("multiprocess", [True, False])
def test_drafts_are_counted(multiprocess: bool) -> None:
    options = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(multiprocess=multiprocess, speculative_config=options) as llm:
        before = llm.get_metrics()
        (output,) = llm.generate("x = 1\n" * 20, params, use_tqdm=False)
        assert holds_within(lambda: llm.get_metrics()["requests_finished"] == 1, PATIENCE_S)
        found = llm.get_metrics()
    assert found.keys() == before.keys()
    assert found["num_speculative_tokens"] == 4
    accepted = [found[f"accepted_at_{place}"] for place in range(4)]
    assert found["accepted_tokens"] == sum(accepted) > 0
    assert accepted == sorted(accepted, reverse=True)
    assert accepted[0] <= found["drafts"] <= found["draft_tokens"] <= 4 * found["drafts"]
    assert output.metrics is not None
    assert output.metrics.num_steps + found["accepted_tokens"] == 60
    counts = output.metrics.num_draft_tokens, output.metrics.num_accepted_tokens
    assert counts == (found["draft_tokens"], found["accepted_tokens"])

    metrics = {each.name: each for each in as_metrics(found, "tiny")}
    vector = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(vector, Vector)
    assert vector.values == accepted
    for name, key in DRAFT_COUNTERS.items():
        assert metrics[f"vllm:{name}"] == Counter(
            f"vllm:{name}", {"model_name": "tiny", "engine": "0"}, found[key]
        )
    drafted = statistics(found, before, 0.0)[0].spec_decoding_stats
    assert drafted is not None
    assert drafted.num_accepted_tokens_per_pos == accepted


def test_without_drafts_there_are_no_metrics_of_them(llm: LLM) -> None:
    found = llm.get_metrics()
    assert found["drafts"] == found["num_speculative_tokens"] == 0
    (output,) = llm.generate("x = 1\n" * 20, SamplingParams(max_tokens=9), use_tqdm=False)
    assert output.metrics is not None
    assert (output.metrics.num_draft_tokens, output.metrics.num_accepted_tokens) == (0, 0)
    assert not [each for each in as_metrics(found, "tiny") if "spec_decode" in each.name]
    assert statistics(found, found, 0.0)[0].spec_decoding_stats is None


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
    began, began_ts = time.time(), time.monotonic()
    outputs = llm.generate(["import os\n" * 30] * 2, params, use_tqdm=False)
    for output in outputs:
        metrics = output.metrics
        assert metrics is not None
        moments = [
            began_ts,
            metrics.arrival_ts,
            metrics.queued_ts,
            metrics.scheduled_ts,
            metrics.first_token_ts,
            metrics.last_token_ts,
            time.monotonic(),
        ]
        assert moments == sorted(moments)
        assert len(set(moments)) == len(moments)
        assert began <= metrics.arrival_time <= time.time()
        assert metrics.arrival_time < metrics.queued_time < metrics.last_token_time
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
