"""Priorities of requests in a real engine: order, tokens and errors."""

from __future__ import annotations

from typing import Any

import pytest

from shmllm import LLM, EngineStartError, RequestError, SamplingParams

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 2**26, "num_threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [[5 + i, 6, 7, 8] for i in range(12)]


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("multiprocess", [True, False])
def test_the_lowest_value_ends_first_with_the_tokens_of_other_orders(multiprocess: bool) -> None:
    with LLM(multiprocess=False, **OPTIONS) as llm:
        alone = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    with LLM(
        multiprocess=multiprocess, **OPTIONS, max_num_seqs=1, scheduling_policy="priority"
    ) as llm:
        assert llm.facts.scheduling_policy == "priority"
        priorities = [3, 1, 2] * 4
        llm.pause_generation()  # so that all wait when the first is chosen
        llm.enqueue(PROMPTS, GREEDY, priority=priorities)
        llm.resume_generation()
        outputs = llm.wait_for_completion(use_tqdm=False)
        assert tokens(outputs) == alone
        ends = [output.metrics.last_token_ts for output in outputs]
        order = sorted(range(12), key=lambda i: ends[i])
        assert order == sorted(range(12), key=lambda i: (priorities[i], i))


def test_preempted_requests_give_the_same_tokens() -> None:
    long = SamplingParams(temperature=0.9, seed=4, max_tokens=60, ignore_eos=True)
    local = OPTIONS | {"multiprocess": False}
    with LLM(**local) as llm:
        alone = tokens(llm.generate(PROMPTS, long, use_tqdm=False))
        per_block = llm.facts.kv_cache_bytes // (llm.facts.num_blocks + 1)
    options = local | {"kv_cache_memory_bytes": 14 * per_block, "max_model_len": 128}
    with LLM(**options, scheduling_policy="priority") as llm:
        priorities = [i % 4 for i in range(12)]
        outputs = llm.generate(PROMPTS, long, use_tqdm=False, priority=priorities)
        assert tokens(outputs) == alone
        assert llm.get_metrics()["preemptions"] > 0


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        ([1], "2 prompts and 1 priorities"),
        ([1, 2, 3], "2 prompts and 3 priorities"),
        ("high", "whole number or a list"),
        (1.5, "whole number or a list"),
        ([1, 1.5], "32-bit whole number, got 1.5"),
        ([True, False], "32-bit whole number, got True"),
        (2**31, "32-bit whole number"),
    ],
)
def test_an_invalid_priority_is_refused(priority: Any, message: str) -> None:
    with LLM(**OPTIONS, multiprocess=False, scheduling_policy="priority") as llm:
        with pytest.raises(RequestError, match=message):
            llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False, priority=priority)
        assert llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False, priority=-(2**31))


def test_an_engine_that_ignores_priorities_says_so() -> None:
    with LLM(**OPTIONS, multiprocess=False) as llm:
        with pytest.raises(RequestError, match="scheduling_policy='priority'"):
            llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False, priority=1)
        assert llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False, priority=0)
    with pytest.raises(EngineStartError, match="scheduling_policy 'lifo' is not one of"):
        LLM(scheduling_policy="lifo")  # type: ignore[arg-type]
