"""Prompts that arrive in chunks, with a fake engine whose tokens are all 7."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from shmllm import PromptChunk, RequestOutputKind, SamplingParams
from shmllm.errors import RequestError, ShmLLMError
from shmllm.wire.messages import Method

LIMIT_S = 30.0


def params(max_tokens, kind=RequestOutputKind.DELTA, **options):
    return SamplingParams(max_tokens=max_tokens, output_kind=kind, **options)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


async def stream(*chunks):
    for chunk in chunks:
        yield chunk


async def collect(llm, *arguments):
    return [output async for output in llm.generate(*arguments)]


def chunk_ends(outputs):
    return [output for output in outputs if output.outputs[0].finish_reason is not None]


def test_each_chunk_comes_after_all_before_it_without_the_last_tokens(make_async_llm):
    llm, _ = make_async_llm()
    chunks = stream([5, 6], PromptChunk([8], params(2)), [9])
    outputs = run(collect(llm, chunks, params(4), "a"))
    ends = chunk_ends(outputs)
    assert [end.prompt_token_ids for end in ends] == [
        [5, 6],
        [5, 6, 7, 7, 7, 8],
        [5, 6, 7, 7, 7, 8, 7, 9],
    ]
    assert [end.outputs[0].finish_reason for end in ends] == ["length"] * 3
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == 4 + 2 + 4
    assert {output.request_id for output in outputs} == {"a"}
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_a_cumulative_output_has_the_completion_of_its_chunk(make_async_llm):
    llm, _ = make_async_llm()
    outputs = run(collect(llm, stream([5], [6]), params(3, RequestOutputKind.CUMULATIVE)))
    assert [end.outputs[0].token_ids for end in chunk_ends(outputs)] == [[7] * 3] * 2


def test_text_is_tokenized_chunk_by_chunk(make_async_llm):
    llm, _ = make_async_llm()
    tokenizer = llm._llm.get_tokenizer()
    outputs = run(collect(llm, stream("The quick ", {"prompt": "fox"}), params(1)))
    first, second = tokenizer.encode("The quick "), tokenizer.encode("fox")
    assert [output.prompt_token_ids for output in outputs] == [first, first + second]
    assert [output.prompt for output in outputs] == ["The quick ", "fox"]


def test_outputs_do_not_wait_for_the_next_chunk(make_async_llm):
    llm, _ = make_async_llm()

    async def main():
        heard = asyncio.Event()

        async def answered():
            yield [5]
            await heard.wait()
            yield [6]
            heard.clear()
            await heard.wait()

        outputs = []
        async for output in llm.generate(answered(), params(3)):
            outputs.append(output)
            if output.outputs[0].finished():
                heard.set()
        assert len(chunk_ends(outputs)) == 2
        # The iterator was still open when the last chunk ended, so that no output is the last one.
        assert not any(output.finished for output in outputs)
        assert llm._requests.ids() == []

    run(main())


def test_no_chunk_is_no_output(make_async_llm):
    llm, engine = make_async_llm()
    assert run(collect(llm, stream(), params(3), "a")) == []
    assert engine.added == []
    assert run(collect(llm, [5], params(3), "a"))[-1].finished


def test_leaving_ends_the_request_and_cancels_the_iterator(make_async_llm):
    llm, engine = make_async_llm()
    engine.steps_left = 1
    ends = []

    async def endless():
        try:
            yield [5]
            await asyncio.sleep(LIMIT_S)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def main():
        async with aclosing(llm.generate(endless(), params(50), "a")) as outputs:
            await anext(outputs)
        assert llm._requests.ids() == []
        await until(lambda: engine.aborted and ends)

    run(main())


def test_an_error_of_the_iterator_ends_the_request_at_once(make_async_llm):
    llm, engine = make_async_llm()
    engine.steps_left = 1

    class InputError(Exception):
        pass

    async def main():
        heard = asyncio.Event()

        async def failing():
            yield [5]
            await heard.wait()
            raise InputError("no more")

        outputs = llm.generate(failing(), params(10**6), "a")
        await anext(outputs)
        heard.set()
        with pytest.raises(InputError, match="no more"):
            await anext(outputs)
        await until(lambda: engine.aborted)
        assert llm._requests.ids() == []

    run(main())


@pytest.mark.parametrize("is_running", [True, False])
def test_an_abort_ends_the_request_and_drops_its_chunks(make_async_llm, is_running):
    llm, engine = make_async_llm()

    async def slow():
        yield [5]
        if is_running:
            yield [6]
        await asyncio.sleep(LIMIT_S)

    async def main():
        if is_running:
            engine.steps_left = 1
        outputs = llm.generate(slow(), params(3), "a")
        seen = [await anext(outputs)]
        while not is_running and not seen[-1].outputs[0].finished():
            seen.append(await anext(outputs))
        if not is_running:
            waiting = asyncio.create_task(anext(outputs))
            await asyncio.sleep(0)
        await llm.abort("a")
        last = await anext(outputs) if is_running else await waiting
        assert last.finished
        assert last.request_id == "a"
        assert last.outputs[0].finish_reason == "abort"
        assert [output async for output in outputs] == []
        assert len(engine.added) == 1

    run(main())


def test_an_engine_that_aborts_a_chunk_ends_the_request(make_async_llm):
    llm, engine = make_async_llm()
    engine.steps_left = 1

    async def main():
        outputs = llm.generate(stream([5], [6]), params(3), "a")
        await anext(outputs)
        engine.abort(engine.added)
        last = await anext(outputs)
        assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
        assert [output async for output in outputs] == []

    run(main())


@pytest.mark.parametrize(
    ("chunks", "own", "message"),
    [
        ([[5]], params(3, n=2), "Input streaming not currently supported with n > 1"),
        ([[5]], params(3, RequestOutputKind.FINAL_ONLY), "supported with output_kind FINAL_ONLY"),
        ([[5], PromptChunk([6], params(3, stop=["x"]))], params(3), "supported with stop strings"),
        ([[5], []], params(3), "the prompt is empty"),
        ([[5], 7], params(3), "must be a str"),
        ([[5] * 20, [6] * 30], params(20), "the prompt has 69 tokens"),
    ],
)
def test_a_chunk_that_cannot_be_completed_is_an_error(make_async_llm, chunks, own, message):
    llm, _ = make_async_llm()
    with pytest.raises(RequestError, match=message):
        run(collect(llm, stream(*chunks), own, "a"))
    assert llm._requests.ids() == []


def test_an_encoder_decoder_takes_whole_prompts(make_async_llm):
    llm, _ = make_async_llm()
    llm._llm.front_end.items.num_encoded = 64
    llm._llm.front_end.items.check_given = lambda *given: None
    with pytest.raises(RequestError, match="not currently supported with encoder-decoders"):
        run(collect(llm, stream([5], [6]), params(3), "a"))


def test_an_id_is_in_use_between_chunks(make_async_llm):
    llm, _ = make_async_llm()

    async def slow():
        yield [5]
        await asyncio.sleep(LIMIT_S)

    async def main():
        async with aclosing(llm.generate(slow(), params(1), "a")) as outputs:
            await anext(outputs)
            with pytest.raises(RequestError, match="in use"):
                await anext(llm.generate([5], params(1), "a"))

    run(main())


def test_the_next_chunk_waits_for_the_end_of_a_pause_with_wait(make_async_llm):
    llm, engine = make_async_llm()
    engine.answers = {Method.PAUSE: 0, Method.RESUME: True, Method.RESET_PREFIX_CACHE: True}

    async def main():
        outputs = llm.generate(stream([5], [6]), params(1))
        await anext(outputs)
        await llm.pause_generation(mode="wait")
        waiting = asyncio.create_task(anext(outputs))
        await asyncio.sleep(0.02)
        assert len(engine.added) == 1
        await llm.resume_generation()
        assert (await waiting).finished

    run(main())


def test_shutdown_raises_in_who_waits_for_a_chunk(make_async_llm):
    llm, _ = make_async_llm()

    async def slow():
        yield [5]
        await asyncio.sleep(LIMIT_S)

    async def main():
        outputs = llm.generate(slow(), params(1))
        await anext(outputs)
        waiting = asyncio.create_task(anext(outputs))
        await asyncio.sleep(0)
        llm.shutdown()
        with pytest.raises(ShmLLMError, match="shut down"):
            await waiting

    run(main())
