"""AsyncLLM with a fake engine: request ids, aborts, slow consumers, and an engine that dies."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import aclosing

import pytest

from shmllm.errors import EngineDeadError, RequestError, ShmLLMError
from shmllm.params.sampling import RequestOutputKind, SamplingParams
from shmllm.wire.messages import Method

CUMULATIVE, DELTA = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA
FINAL = RequestOutputKind.FINAL_ONLY
LIMIT_S = 30.0


def params(max_tokens, kind=CUMULATIVE, **options):
    return SamplingParams(max_tokens=max_tokens, output_kind=kind, **options)


@pytest.fixture
def make_llm(make_async_llm):
    return make_async_llm


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


async def collect(llm, *arguments):
    return [output async for output in llm.generate(*arguments)]


def test_a_request_runs_to_its_end(make_llm):
    llm, _ = make_llm()
    outputs = run(collect(llm, [5], params(9), "a"))
    assert outputs[-1].finished
    assert not any(output.finished for output in outputs[:-1])
    assert {output.request_id for output in outputs} == {"a"}
    assert outputs[-1].outputs[0].token_ids == [7] * 9
    sizes = [len(output.outputs[0].token_ids) for output in outputs]
    assert sizes == sorted(set(sizes))


def test_concurrent_requests_get_their_own_outputs(make_llm):
    llm, _ = make_llm(3)

    async def main():
        wanted = {f"r{n}": 1 + n % 13 for n in range(200)}
        jobs = [collect(llm, [5, n], params(wanted[f"r{n}"], DELTA), f"r{n}") for n in range(200)]
        for n, outputs in enumerate(await asyncio.gather(*jobs)):
            assert sum(len(output.outputs[0].token_ids) for output in outputs) == wanted[f"r{n}"]
            assert {output.request_id for output in outputs} == {f"r{n}"}
            assert outputs[0].prompt_token_ids == [5, n]

    run(main())


def test_completions_of_one_prompt_end_together_or_apart(make_llm):
    llm, _ = make_llm()
    outputs = run(collect(llm, [5], params(6, DELTA, n=3)))
    tokens = {0: [], 1: [], 2: []}
    for output in outputs:
        for completion in output.outputs:
            tokens[completion.index] += completion.token_ids
    assert tokens == {0: [7] * 6, 1: [7] * 6, 2: [7] * 6}
    assert [output.finished for output in outputs].count(True) == 1


def test_a_completion_that_ends_in_the_same_poll_as_the_last_one_is_not_lost(make_llm):
    llm, engine = make_llm(10)
    engine.steps_left = 0

    async def main():
        task = asyncio.create_task(collect(llm, [5], params(3, DELTA, n=2)))
        await until(lambda: len(engine.left) == 2)
        engine.left[1] = 1  # so completion 1 ends two steps before completion 0
        engine.steps_left = None
        return await task

    (output,) = run(main())
    tokens = {completion.index: completion.token_ids for completion in output.outputs}
    assert tokens == {0: [7] * 3, 1: [7]}
    assert output.finished


def test_final_only_yields_one_output(make_llm):
    llm, _ = make_llm()
    outputs = run(collect(llm, [5], params(6, FINAL, n=2)))
    assert [len(output.outputs) for output in outputs] == [2]


CONVERSATION = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chat_template": "{{ messages[0].content }}{{ x }}", "chat_template_kwargs": {"x": "y"}},
        {
            "chat_template": "x",
            "chat_template_kwargs": {
                "chat_template": "{{ self }}{{ marks }}",
                "marks": 2,
                "self": 1,
            },
        },
        {"continue_final_message": True},
        {"add_generation_prompt": False, "tools": [{"type": "function"}]},
    ],
    ids=lambda options: ",".join(options),
)
def test_a_conversation_becomes_the_prompt_that_it_is_for_llm(make_llm, options):
    llm, _ = make_llm()

    async def main():
        return [o async for o in llm.chat(CONVERSATION, params(5, DELTA), "a", **options)]

    outputs = run(main())
    (expected,) = llm._llm.chat(CONVERSATION, params(5), use_tqdm=False, **options)
    assert {output.request_id for output in outputs} == {"a"}
    for output in outputs:
        assert output.prompt == expected.prompt
        assert output.prompt_token_ids == expected.prompt_token_ids
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == 5
    assert outputs[-1].finished


def test_leaving_a_conversation_ends_its_request(make_llm):
    llm, engine = make_llm()
    engine.steps_left = 1

    async def main():
        async with aclosing(llm.chat(CONVERSATION, params(50, DELTA))) as outputs:
            await anext(outputs)
        await until(lambda: engine.aborted)

    run(main())


def test_messages_that_are_none_are_refused(make_llm):
    llm, _ = make_llm()

    async def main():
        with pytest.raises(RequestError, match="no role"):
            await anext(llm.chat([{"content": "a"}]))
        with pytest.raises(RequestError, match="messages must be a list"):
            await anext(llm.chat("a"))

    run(main())


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
def test_a_slow_consumer_gets_one_output_with_all_new_tokens(make_llm, kind):
    llm, engine = make_llm()
    engine.steps_left = 1

    async def main():
        stream = llm.generate([5], params(50, kind))
        first = await anext(stream)
        assert first.outputs[0].token_ids == [7]
        engine.steps_left = None
        await until(lambda: not engine.left)
        rest = [output async for output in stream]
        assert len(rest) == 1
        assert rest[0].finished
        assert len(rest[0].outputs[0].token_ids) == (49 if kind is DELTA else 50)

    run(main())


def test_no_calls_accumulate_in_a_busy_event_loop(make_llm):
    llm, engine = make_llm()

    async def main():
        loop = asyncio.get_running_loop()
        calls = []
        original = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: (calls.append(args), original(*args))[1]
        stream = llm.generate([5], params(300, DELTA))
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        while not engine.added or engine.left:  # this blocks the event loop
            pass
        await task
        await stream.aclose()
        assert len(calls) <= 2

    run(main())


def test_a_cancelled_task_aborts_its_request(make_llm):
    llm, engine = make_llm()
    engine.steps_left = 3

    async def main():
        task = asyncio.create_task(collect(llm, [5], params(50), "a"))
        await until(lambda: engine.steps_left == 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: engine.aborted == [0])
        assert engine.left == {}
        engine.steps_left = None
        assert (await collect(llm, [5], params(2), "a"))[-1].finished

    run(main())


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_cancelled_call_leaves_the_others_alone(make_llm, has_begun):
    llm, _ = make_llm()
    begun, go_on = threading.Event(), threading.Event()

    async def main():
        first = asyncio.create_task(llm._call(lambda: begun.set() or go_on.wait(LIMIT_S)))
        await until(begun.is_set)
        ran = []
        second = asyncio.create_task(llm._call(lambda: ran.append(1)))
        await asyncio.sleep(0)
        cancelled = first if has_begun else second
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        go_on.set()
        assert len(await collect(llm, [5], params(2, FINAL))) == 1
        assert cancelled.cancelled()
        assert ran == ([1] if has_begun else [])

    run(main())


def test_closing_the_generator_aborts_the_request(make_llm):
    llm, engine = make_llm()
    engine.steps_left = 1

    async def main():
        async with aclosing(llm.generate([5], params(50))) as stream:
            async for _ in stream:
                break
        await until(lambda: engine.aborted == [0])
        engine.steps_left = None
        async for _ in llm.generate([5], params(1)):
            break  # the request is finished, so nothing is aborted

    run(main())
    assert engine.aborted == [0]


def test_collecting_a_generator_as_garbage_aborts_its_request(make_llm):
    llm, engine = make_llm()
    engine.steps_left = 1

    async def main():
        stream = llm.generate([5], params(50))
        await anext(stream)
        del stream
        gc.collect()
        await until(lambda: engine.aborted == [0])

    run(main())


def test_an_aborted_request_has_a_last_output_with_its_tokens_so_far(make_llm):
    llm, engine = make_llm()
    engine.steps_left = 4

    async def main():
        task = asyncio.create_task(collect(llm, [5], params(50), "a"))
        await until(lambda: engine.steps_left == 0)
        await llm.abort("a")
        last = (await task)[-1]
        assert last.finished
        assert last.outputs[0].finish_reason == "abort"
        assert last.outputs[0].token_ids == [7] * 4
        engine.steps_left = None
        assert (await collect(llm, [5], params(2), "a"))[-1].outputs[0].finish_reason == "length"
        await llm.abort(["a", "unknown"])

    run(main())


def test_one_call_aborts_several_requests(make_llm):
    llm, engine = make_llm()
    engine.steps_left = 1

    async def main():
        tasks = [asyncio.create_task(collect(llm, [5], params(50), name)) for name in "abc"]
        await until(lambda: len(engine.added) == 3)
        await llm.abort(["a", "c"])
        assert [(await tasks[n])[-1].outputs[0].finish_reason for n in (0, 2)] == ["abort"] * 2
        assert not tasks[1].done()
        engine.steps_left = None
        assert (await tasks[1])[-1].outputs[0].finish_reason == "length"

    run(main())


def test_a_request_id_in_use_is_an_error_without_effect_on_its_request(make_llm):
    llm, engine = make_llm()
    engine.steps_left = 1

    async def main():
        task = asyncio.create_task(collect(llm, [5], params(50), "a"))
        await until(lambda: engine.steps_left == 0)
        with pytest.raises(RequestError, match="'a' is in use"):
            await collect(llm, [5], params(1), "a")
        engine.steps_left = None
        assert (await task)[-1].outputs[0].finish_reason == "length"

    run(main())


def test_a_request_id_is_free_after_the_last_output(make_llm):
    llm, _ = make_llm()

    async def main():
        stream = llm.generate([5], params(1), "a")
        async for output in stream:
            assert output.finished
            assert (await collect(llm, [6], params(3), "a"))[-1].prompt_token_ids == [6]

    run(main())


@pytest.mark.parametrize(
    ("prompt", "own", "message"),
    [
        ([999], None, "token id 999"),
        ([], None, "empty"),
        ([5], "x", "SamplingParams"),
        (3, None, "int"),
    ],
)
def test_an_invalid_request_raises_in_its_consumer(make_llm, prompt, own, message):
    llm, engine = make_llm()

    async def main():
        with pytest.raises(RequestError, match=message):
            await collect(llm, prompt, own, "a")
        return await collect(llm, [5], params(2), "a")

    assert run(main())[-1].finished
    assert len(engine.added) == 1


def test_a_refusal_by_the_engine_raises_in_the_consumer(make_llm):
    llm, engine = make_llm()
    engine.refuse = {0}
    with pytest.raises(RequestError, match="no"):
        run(collect(llm, [5], params(2)))


def test_every_consumer_gets_an_error_when_the_engine_dies(make_llm):
    llm, engine = make_llm()
    engine.steps_left = 2

    async def main():
        jobs = [asyncio.create_task(collect(llm, [5], params(50))) for _ in range(5)]
        await until(lambda: len(engine.added) == 5)
        assert llm.is_running
        assert not llm.errored
        engine.error = EngineDeadError("gone", signal=9)
        for result in await asyncio.gather(*jobs, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
            assert result.signal == 9
        assert llm.errored
        assert not llm.is_running
        with pytest.raises(EngineDeadError):
            await llm.check_health()
        with pytest.raises(EngineDeadError):
            await collect(llm, [5], params(1))
        with pytest.raises(EngineDeadError):
            await llm.reset_prefix_cache()

    run(main())


def test_outputs_from_before_the_engine_died_are_not_lost(make_llm):
    llm, engine = make_llm()
    engine.steps_left = 2

    async def main():
        stream = llm.generate([5], params(2, DELTA))
        task = asyncio.create_task(collect(llm, [5], params(50)))
        got = [output async for output in stream]
        assert got[-1].finished
        engine.error = EngineDeadError("gone")
        with pytest.raises(EngineDeadError):
            await task

    run(main())


def test_shutdown_raises_in_waiting_consumers(make_llm):
    llm, engine = make_llm()
    engine.steps_left = 1

    async def main():
        task = asyncio.create_task(collect(llm, [5], params(50)))
        await until(lambda: engine.steps_left == 0)
        llm.shutdown()
        llm.shutdown()
        with pytest.raises(ShmLLMError, match="shut down"):
            await task
        with pytest.raises(ShmLLMError, match="shut down"):
            await collect(llm, [5], params(1))
        assert llm.errored

    run(main())
    assert engine.is_closed


def test_shutdown_before_any_request(make_llm):
    llm, engine = make_llm()
    llm.shutdown()
    assert engine.is_closed
    with pytest.raises(ShmLLMError, match="shut down"):
        run(collect(llm, [5], params(1)))


def test_it_works_in_one_event_loop_after_another(make_llm):
    llm, engine = make_llm()
    for _ in range(3):
        assert run(collect(llm, [5], params(3)))[-1].finished

    async def leave_running():
        engine.steps_left = 1
        await anext(llm.generate([5], params(50), "left"))

    run(leave_running())
    engine.steps_left = None
    assert run(collect(llm, [5], params(3), "left"))[-1].finished
    assert engine.left == {}


def test_it_works_in_several_event_loops_at_once(make_llm):
    llm, _ = make_llm()
    results = []

    def work():
        async def main():
            jobs = [collect(llm, [5], params(30, DELTA)) for _ in range(20)]
            return await asyncio.gather(*jobs)

        results.append(run(main()))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    for result in results:
        totals = [sum(len(o.outputs[0].token_ids) for o in outputs) for outputs in result]
        assert totals == [30] * 20
    assert len(results) == 3


def test_requests_wait_for_the_end_of_a_pause_with_wait(make_llm):
    llm, engine = make_llm()
    engine.answers = {Method.PAUSE: 0, Method.RESUME: True, Method.RESET_PREFIX_CACHE: True}

    async def main():
        await llm.pause_generation("wait")
        task = asyncio.create_task(collect(llm, [5], params(2)))
        await asyncio.sleep(0.02)
        assert engine.added == []
        assert await llm.resume_generation()
        assert (await task)[-1].finished

    run(main())
    assert engine.calls == [
        (Method.PAUSE, "wait"),
        (Method.RESET_PREFIX_CACHE, {"running": False}),
        (Method.RESUME, None),
    ]


def test_no_output_arrives_after_a_pause(make_llm, monkeypatch):
    llm, engine = make_llm()
    call = engine.call

    def end_the_step_in_flight(method, argument=None):
        if method is Method.PAUSE:
            engine._events.append(engine._step())
            engine.steps_left = 0
        return call(method, argument)

    monkeypatch.setattr(engine, "call", end_the_step_in_flight)
    outputs = []

    async def consume():
        async for output in llm.generate([5], params(1_000_000, DELTA)):
            outputs.append(output)

    async def main():
        task = asyncio.create_task(consume())
        for _ in range(20):
            seen = len(outputs)
            await until(lambda seen=seen: len(outputs) > seen)
            await llm.pause_generation(mode="keep")
            seen = len(outputs)
            await asyncio.sleep(0.002)
            assert len(outputs) == seen
            engine.steps_left = None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(main())


def test_a_look_at_the_pause_comes_after_the_calls_before_it(make_llm, monkeypatch):
    llm, engine = make_llm()
    engine.answers = {Method.PAUSE: 0, Method.RESET_PREFIX_CACHE: True}
    monkeypatch.setattr(llm._llm, "is_paused", lambda: bool(engine.calls))

    async def main():
        pausing = asyncio.create_task(llm.pause_generation())
        looking = asyncio.create_task(llm.is_paused())
        assert await looking
        await pausing

    run(main())


def test_calls_do_not_wait_for_requests(make_llm):
    llm, engine = make_llm()
    engine.steps_left = 1
    engine.answers = {Method.RESET_PREFIX_CACHE: False}

    async def main():
        task = asyncio.create_task(collect(llm, [5], params(50)))
        await until(lambda: engine.steps_left == 0)
        assert await llm.reset_prefix_cache() is False
        engine.steps_left = None
        await task

    run(main())


def test_it_cannot_be_pickled(make_llm):
    import pickle

    llm, _ = make_llm()
    with pytest.raises((ShmLLMError, TypeError)):
        pickle.dumps(llm)
