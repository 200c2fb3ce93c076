"""Streams and coroutines of real engines: the tokens of a batch, and the ways to end early."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from support.engines import assert_idle, is_idle, named_engine, slow_steps
from support.programs import python
from support.waiting import PATIENCE_S, holds_within, join_all, wait_until_async

from shmllm import LLM, AsyncLLM, EngineDeadError, RequestOutput, SamplingParams
from shmllm.params.sampling import RequestOutputKind

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

KV_BYTES = 2**27
PROMPTS = [f"def function_{n}(argument):\n    return" for n in range(40)]


def params(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def delta(max_tokens: int) -> SamplingParams:
    return params(max_tokens, output_kind=RequestOutputKind.DELTA)


@pytest.fixture(scope="module")
def name(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The engine of streams and coroutines."""
    directory = tmp_path_factory.mktemp("engine")
    with named_engine(directory, max_num_seqs=8, allow_callables=True) as (name, _):
        yield name


@pytest.fixture(scope="module")
def llm(name: str) -> Iterator[LLM]:
    with LLM.attach(name) as llm:
        yield llm


@pytest.fixture(scope="module")
def coroutines(name: str) -> Iterator[AsyncLLM]:
    """A front end that each test uses in an event loop of its own."""
    llm = AsyncLLM.attach(name)
    try:
        yield llm
    finally:
        llm.shutdown()


@pytest.fixture
def async_llm(coroutines: AsyncLLM) -> Iterator[AsyncLLM]:
    yield coroutines
    assert_idle(coroutines)


@pytest.fixture
def doomed() -> Iterator[AsyncLLM]:
    """An AsyncLLM whose engine the test kills."""
    llm = AsyncLLM(kv_cache_memory_bytes=KV_BYTES)
    try:
        yield llm
    finally:
        llm.shutdown()


def has_generated(llm: AsyncLLM, num_tokens: int) -> Callable[[], bool]:
    """Whether the engine has generated that many tokens since this call."""
    before = llm.get_metrics()["generated_tokens"]
    return lambda: llm.get_metrics()["generated_tokens"] >= before + num_tokens


def batch(llm: LLM, own: list[SamplingParams]) -> list[tuple[str, list[int]]]:
    outputs = llm.generate(PROMPTS, own, use_tqdm=False)
    return [(output.outputs[0].text, output.outputs[0].token_ids) for output in outputs]


def test_a_stream_has_what_a_batch_has(llm: LLM) -> None:
    own = [params(1 + 7 * n % 30) for n in range(len(PROMPTS))]
    expected = batch(llm, own)
    for ordered in (False, True):
        found = {
            output.prompt_index: (output.outputs[0].text, output.outputs[0].token_ids)
            for output in llm.stream(iter(PROMPTS), iter(own), ordered=ordered)
        }
        assert [found[n] for n in range(len(PROMPTS))] == expected


def test_deltas_add_up_to_what_a_batch_has(llm: LLM) -> None:
    expected = batch(llm, [params(20)] * len(PROMPTS))
    texts, tokens = [""] * len(PROMPTS), [[] for _ in PROMPTS]  # type: ignore[var-annotated]
    for output in llm.stream(PROMPTS, delta(20)):
        texts[output.prompt_index] += output.outputs[0].text
        tokens[output.prompt_index] += output.outputs[0].token_ids
    assert list(zip(texts, tokens, strict=True)) == expected


def test_an_endless_generator_left_early_leaves_an_idle_engine(llm: LLM) -> None:
    prompts = (f"x = {n}" for n in itertools.count())
    assert len(list(itertools.islice(llm.stream(prompts, params(3)), 200))) == 200
    llm._dispatcher.pump(0)
    assert holds_within(lambda: is_idle(llm), PATIENCE_S), llm.get_metrics()


def test_streams_in_threads_and_a_batch_in_the_loop_of_one(llm: LLM) -> None:
    expected = batch(llm, [params(10)] * len(PROMPTS))
    found: list[list[list[int]]] = []

    def work() -> None:
        outputs = list(llm.stream(PROMPTS, params(10), ordered=True))
        found.append([output.outputs[0].token_ids for output in outputs])

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for output in llm.stream(PROMPTS[:4], params(10)):
        inner = llm.generate(PROMPTS[5], params(10), use_tqdm=False)[0].outputs[0].token_ids
        assert inner == expected[5][1]
        assert output.outputs[0].token_ids == expected[output.prompt_index][1]
    join_all(threads)
    assert found == [[tokens for _, tokens in expected]] * 3


def test_a_killed_engine_ends_a_stream() -> None:
    llm = LLM(kv_cache_memory_bytes=KV_BYTES)
    stream = llm.stream(itertools.repeat("x"), delta(100))
    next(stream)
    os.kill(llm._client.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(EngineDeadError) as caught:
        list(stream)
    assert caught.value.signal == signal.SIGKILL
    assert list(stream) == []
    llm.close()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 2 * PATIENCE_S))


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    output = None
    async for output in stream:  # noqa: B007
        pass
    assert output is not None
    return output


def test_coroutines_have_what_a_batch_has(llm: LLM, async_llm: AsyncLLM) -> None:
    own = [params(1 + 7 * n % 30) for n in range(len(PROMPTS))]

    async def main() -> list[tuple[str, list[int]]]:
        jobs = [last(async_llm.generate(p, o)) for p, o in zip(PROMPTS, own, strict=True)]
        return [(o.outputs[0].text, o.outputs[0].token_ids) for o in await asyncio.gather(*jobs)]

    assert run(main()) == batch(llm, own)


def test_chunks_have_the_tokens_of_whole_prompts(llm: LLM, async_llm: AsyncLLM) -> None:
    async def chunks(prompts: list[str]) -> AsyncIterator[str]:
        for prompt in prompts:
            yield prompt

    async def ends(prompts: list[str]) -> list[RequestOutput]:
        arguments = chunks(prompts), params(9)
        return [o async for o in async_llm.generate(*arguments) if o.outputs[0].finished()]

    async def main() -> list[list[RequestOutput]]:
        return await asyncio.gather(ends(PROMPTS[:3]), ends(PROMPTS[3:6]))

    for first, second, third in run(main()):
        assert [output.finished for output in (first, second, third)] == [False, False, True]
        before = first.prompt_token_ids + first.outputs[0].token_ids[:-1]
        assert second.prompt_token_ids[: len(before)] == before
        for output in (first, second, third):
            prompt = {"prompt_token_ids": output.prompt_token_ids}
            (whole,) = llm.generate([prompt], params(9), use_tqdm=False)
            assert output.outputs[0].token_ids == whole.outputs[0].token_ids
            assert output.outputs[0].text == whole.outputs[0].text


def test_cancelled_tasks_leave_an_idle_engine_and_the_others_alone(
    llm: LLM, async_llm: AsyncLLM
) -> None:
    expected = batch(llm, [params(60)] * len(PROMPTS))

    async def main() -> None:
        runs = has_generated(async_llm, 1)
        tasks = [
            asyncio.create_task(last(async_llm.generate(p, params(60 if n % 2 else 100), str(n))))
            for n, p in enumerate(PROMPTS)
        ]
        with slow_steps(async_llm):
            await wait_until_async(runs, "the first token")
            for task in tasks[::2]:
                task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for n, result in enumerate(results):
            if n % 2:
                assert isinstance(result, RequestOutput)
                assert result.outputs[0].token_ids == expected[n][1]
            else:
                assert isinstance(result, asyncio.CancelledError)
        await wait_until_async(lambda: is_idle(async_llm), "an idle engine")

    run(main())


def test_a_slow_consumer_gets_merged_deltas(llm: LLM, async_llm: AsyncLLM) -> None:
    expected = llm.generate(PROMPTS[0], params(200), use_tqdm=False)[0].outputs[0]

    async def main() -> None:
        outputs = []
        async for output in async_llm.generate(PROMPTS[0], delta(200)):
            outputs.append(output.outputs[0])
            if len(outputs) == 2:
                await wait_until_async(lambda: is_idle(async_llm), "an idle engine")
        assert len(outputs) < 10, "the engine is idle a moment before its last outputs are read"
        assert "".join(output.text for output in outputs) == expected.text
        assert list(itertools.chain(*(o.token_ids for o in outputs))) == expected.token_ids

    run(main())


def test_an_abort_keeps_the_tokens_so_far(llm: LLM, async_llm: AsyncLLM) -> None:
    expected = llm.generate(PROMPTS[0], params(100), use_tqdm=False)[0].outputs[0].token_ids

    async def main() -> None:
        runs = has_generated(async_llm, 3)
        with slow_steps(async_llm):
            task = asyncio.create_task(last(async_llm.generate(PROMPTS[0], params(100), "a")))
            await wait_until_async(runs, "three tokens")
            await async_llm.abort("a")
        completion = (await task).outputs[0]
        assert completion.finish_reason == "abort"
        assert 0 < len(completion.token_ids) < 100
        assert completion.token_ids == expected[: len(completion.token_ids)]
        again = await last(async_llm.generate(PROMPTS[0], params(3), "a"))
        assert again.outputs[0].token_ids == expected[:3]

    run(main())


def test_a_killed_engine_reaches_every_consumer(doomed: AsyncLLM) -> None:
    async def main() -> None:
        runs = has_generated(doomed, 1)
        tasks = [asyncio.create_task(last(doomed.generate(p, params(100)))) for p in PROMPTS]
        with slow_steps(doomed):
            await wait_until_async(runs, "the first token")
            os.kill(doomed._llm._client.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
            assert result.signal == signal.SIGKILL
        assert doomed.errored
        with pytest.raises(EngineDeadError):
            await last(doomed.generate("x", params(1)))

    run(main())


@pytest.mark.slow
def test_an_engine_killed_while_idle_is_reported(doomed: AsyncLLM) -> None:
    run(last(doomed.generate("x", params(1))))
    os.kill(doomed._llm._client.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    assert holds_within(lambda: doomed.errored, PATIENCE_S)
    with pytest.raises(EngineDeadError):
        run(last(doomed.generate("x", params(1))))


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_requests_before_and_during_a_pause(llm: LLM, async_llm: AsyncLLM, mode: Any) -> None:
    expected = llm.generate(PROMPTS[0], params(60), use_tqdm=False)[0].outputs[0].token_ids

    async def main() -> None:
        runs = has_generated(async_llm, 3)
        with slow_steps(async_llm) if mode != "wait" else nullcontext():
            before = asyncio.create_task(last(async_llm.generate(PROMPTS[0], params(60))))
            await wait_until_async(runs, "three tokens")
            await async_llm.pause_generation(mode=mode)
        assert await async_llm.is_paused()
        during = asyncio.create_task(last(async_llm.generate(PROMPTS[0], params(60))))
        if mode != "keep":
            await wait_until_async(before.done, "the end of what ran")
        await asyncio.sleep(0.2)
        assert not during.done()
        assert before.done() == (mode != "keep")
        assert await async_llm.resume_generation()
        first, second = (await before).outputs[0], (await during).outputs[0]
        assert second.token_ids == expected
        assert first.finish_reason == ("abort" if mode == "abort" else "length")
        assert first.token_ids == expected[: len(first.token_ids)]

    run(main())


ENDINGS = {
    "nothing": "",
    "exit": "sys.exit(0)",
    "exception": "raise KeyError('mine')",
    "collected": "del llm; gc.collect(); print(json.dumps(threading.active_count()))",
}


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param("nothing", marks=pytest.mark.slow),
        pytest.param("exit", marks=pytest.mark.slow),
        pytest.param("exception", marks=pytest.mark.slow),
        "collected",
    ],
)
def test_a_program_ends_with_requests_under_way_and_no_shutdown(ending: str) -> None:
    source = f"""
import asyncio, gc, json, sys, threading
from shmllm import AsyncLLM, SamplingParams
llm = AsyncLLM(kv_cache_memory_bytes=2**27)
async def main():
    stream = llm.generate("x", SamplingParams(max_tokens=900, ignore_eos=True))
    await anext(stream)
asyncio.run(main())
{ENDINGS[ending]}
"""
    done = python("-c", source)
    assert done.returncode == (1 if ending == "exception" else 0), done.stderr
    assert (b"KeyError" in done.stderr) == (ending == "exception")
    assert b"Exception ignored" not in done.stderr
    if ending == "collected":
        assert json.loads(done.stdout) == 1
