"""Pausing real engines: running requests are aborted, drained or frozen, for all front ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
from support.engines import assert_unused, named_engine, run_a_little, slow_steps
from support.waiting import PATIENCE_S, join_all, wait_until

from shmllm import LLM, AsyncLLM, EnginePausedError, RequestError, SamplingParams

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

PROMPT = "def main():\n"
NUM_TOKENS = 100
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with named_engine(tmp_path_factory.mktemp("engine"), allow_callables=True) as (name, _):
        yield name


@pytest.fixture
def name(engine: str) -> Iterator[str]:
    yield engine
    assert_unused(engine)


@pytest.fixture
def attached(name: str) -> Iterator[LLM]:
    with LLM.attach(name) as llm:
        yield llm


@pytest.fixture(scope="module")
def local() -> Iterator[LLM]:
    with LLM(multiprocess=False, kv_cache_memory_bytes=2**27, num_threads=1) as llm:
        yield llm


@pytest.fixture(params=["attached", "local"], ids=["process", "same process"])
def llm(request: pytest.FixtureRequest, engine: str) -> LLM:
    llm: LLM = request.getfixturevalue(request.param)
    return llm


def tokens_of(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_abort_ends_running_requests_with_their_tokens_so_far(llm: LLM) -> None:
    expected = tokens_of(llm)
    with slow_steps(llm):
        llm.enqueue([PROMPT, PROMPT], GREEDY)
        run_a_little(llm)
        llm.pause_generation()
    assert llm.is_paused()
    for output in llm.wait_for_completion(use_tqdm=False):
        completion = output.outputs[0]
        assert completion.finish_reason == "abort"
        assert 0 < len(completion.token_ids) < NUM_TOKENS
        assert completion.token_ids == expected[: len(completion.token_ids)]
    llm.enqueue(PROMPT, GREEDY)  # waits, and is not refused
    assert llm.resume_generation()
    assert not llm.is_paused()
    assert llm.wait_for_completion(use_tqdm=False)[0].outputs[0].token_ids == expected


@pytest.mark.parametrize("clear_cache", [True, False])
def test_keep_freezes_requests_which_continue_with_the_same_tokens(
    llm: LLM, clear_cache: bool
) -> None:
    expected = tokens_of(llm)
    with slow_steps(llm):
        llm.enqueue(PROMPT, GREEDY)
        run_a_little(llm)
        llm.pause_generation("keep", clear_cache=clear_cache)
    so_far = llm.get_metrics()["generated_tokens"]
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        llm._dispatcher.pump(0.05)
    assert llm.get_metrics()["generated_tokens"] == so_far
    assert (llm.get_metrics()["kv_blocks_used"] == 0) == clear_cache
    llm.resume_generation()
    output = llm.wait_for_completion(use_tqdm=False)[0].outputs[0]
    assert (output.token_ids, output.finish_reason) == (expected, "length")


def test_wait_returns_when_all_requests_ended_and_refuses_new_ones(llm: LLM) -> None:
    expected = tokens_of(llm)
    llm.enqueue([PROMPT] * 3, GREEDY)
    llm.pause_generation("wait")
    assert llm.get_metrics()["running"] == llm.get_metrics()["waiting"] == 0
    with pytest.raises(EnginePausedError, match="try again"):
        llm.generate(PROMPT, SHORT, use_tqdm=False)
    with pytest.raises(EnginePausedError, match="prompt 0"):
        list(llm.stream([PROMPT], SHORT))
    (refused,) = llm.stream([PROMPT], SHORT, on_error="yield")
    assert refused.outputs[0].finish_reason == "error"
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [expected] * 3
    llm.resume_generation()
    assert tokens_of(llm) == expected


def test_a_pause_clears_the_prefix_cache_unless_told_otherwise(llm: LLM) -> None:
    prompt = PROMPT * 30

    def num_cached() -> int:
        return llm.generate(prompt, SHORT, use_tqdm=False)[0].num_cached_tokens

    num_cached()
    assert num_cached() > 0
    llm.pause_generation("wait", clear_cache=False)
    llm.resume_generation()
    assert num_cached() > 0
    llm.pause_generation("wait")
    llm.resume_generation()
    assert num_cached() == 0


def test_an_unknown_mode_is_an_error_and_pauses_nothing(llm: LLM) -> None:
    with pytest.raises(RequestError, match="one of 'abort', 'wait', 'keep', got 'stop'"):
        llm.pause_generation("stop")  # type: ignore[arg-type]
    assert not llm.is_paused()


def test_a_pause_reaches_requests_of_another_thread(name: str) -> None:
    with LLM.attach(name) as llm:
        expected = tokens_of(llm)
        found = []
        thread = threading.Thread(target=lambda: found.append(tokens_of(llm)))
        with slow_steps(llm):
            thread.start()
            wait_until(lambda: llm.get_metrics()["running"] == 1, "the request runs")
            llm.pause_generation("keep")
        time.sleep(0.2)
        assert found == []
        llm.resume_generation()
        join_all([thread])
        assert found == [expected]


def test_a_pause_ends_with_its_front_end(name: str) -> None:
    with LLM.attach(name) as llm:
        with LLM.attach(name) as other:
            other.pause_generation("keep")
            llm.pause_generation("keep")
            assert not llm.resume_generation()
            assert llm.is_paused()
        wait_until(lambda: not llm.is_paused(), "the pause of the front end that left ends")
        assert len(tokens_of(llm)) == NUM_TOKENS


def test_a_pause_aborts_the_requests_of_other_front_ends(name: str) -> None:
    with LLM.attach(name) as llm, LLM.attach(name) as other:
        with slow_steps(llm):
            llm.enqueue(PROMPT, GREEDY)
            run_a_little(llm)
            other.pause_generation("abort")
        assert llm.wait_for_completion(use_tqdm=False)[0].outputs[0].finish_reason == "abort"


def test_no_output_reaches_a_coroutine_after_a_pause(name: str) -> None:
    async def main() -> None:
        sizes: list[int] = []
        async with AsyncLLM.attach(name) as llm:

            async def consume() -> None:
                async for output in llm.generate(PROMPT, GREEDY):
                    sizes.append(len(output.outputs[0].token_ids))

            task = asyncio.create_task(consume())
            for _ in range(10):
                before = len(sizes)
                while len(sizes) == before and not task.done():
                    await asyncio.sleep(0.001)
                await llm.pause_generation(mode="keep")
                before = len(sizes)
                await asyncio.sleep(0.02)
                assert len(sizes) == before
                await llm.resume_generation()
            await task
            assert sizes[-1] == NUM_TOKENS

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
