"""Requests of {"data": ...} of an AsyncLLM, with a fake engine whose tokens are all 7."""

from __future__ import annotations

import asyncio

import pytest

from shmllm import EngineDeadError, EngineStartError, RequestOutputKind, SamplingParams
from shmllm.errors import RequestError
from shmllm.plugins.io_processor import IOProcessor

LIMIT_S = 30.0


class Numbers(IOProcessor):
    """Each number is a prompt. The result is what came of each, in the order in which they ended.

    Attributes:
        may_begin: `pre_process_async` waits for it.
        ids: the ids of requests that it was called with.
        received: the indices of the outputs that it got.
    """

    def __init__(self):
        super().__init__(None, None)
        self.may_begin = asyncio.Event()
        self.may_begin.set()
        self.ids, self.received = [], []

    def parse_data(self, data):
        if not all(isinstance(number, int) for number in data):
            raise ValueError("no numbers")
        return data

    def merge_sampling_params(self, params=None):
        return params or SamplingParams(max_tokens=4)

    def pre_process(self, prompt, request_id=None, **kwargs):
        raise AssertionError("the event loop would wait")

    async def pre_process_async(self, prompt, request_id=None, **kwargs):
        await self.may_begin.wait()
        self.ids.append(request_id)
        return [[5] * number for number in prompt]

    def post_process(self, model_output, request_id=None, **kwargs):
        raise AssertionError("the event loop would wait")

    async def post_process_async(self, model_output, request_id=None, **kwargs):
        self.ids.append(request_id)
        result = []
        async for index, output in model_output:
            self.received.append(index)
            result.append((index, output.request_id, tokens_of(output)))
        return result


class Impatient(Numbers):
    """The result is the index of the prompt that ended first."""

    async def post_process_async(self, model_output, request_id=None, **kwargs):
        index, _ = await anext(model_output)
        return index


class Plain(Numbers):
    """Has no methods for coroutines."""

    pre_process_async = IOProcessor.pre_process_async
    post_process_async = IOProcessor.post_process_async

    def pre_process(self, prompt, request_id=None, **kwargs):
        return [5] * prompt[0] if len(prompt) == 1 else [[5] * number for number in prompt]

    def post_process(self, model_output, request_id=None, **kwargs):
        return [len(output.prompt_token_ids) for output in model_output]


def tokens_of(output):
    return output.outputs[0].token_ids


def params(max_tokens, kind=RequestOutputKind.CUMULATIVE):
    return SamplingParams(max_tokens=max_tokens, output_kind=kind)


@pytest.fixture
def make_llm(make_async_llm):
    def make(processor_class=Numbers):
        llm, engine = make_async_llm()
        llm._llm._io_processor = processor_class()
        return llm, engine, llm._llm._io_processor

    return make


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


async def collect(llm, data, *arguments):
    return [output async for output in llm.generate({"data": data}, *arguments)]


async def begin_three(llm, engine, *arguments):
    """Begin a request of three; return its task, and the numbers of the three in the engine."""
    task = asyncio.create_task(collect(llm, [1, 2, 3], *arguments))
    await until(lambda: len(engine.left) == 3)
    return task, sorted(engine.left)


def assert_unused(llm, engine):
    """No request is left, neither in the front end nor in the engine."""
    assert llm._requests.ids() == []
    assert engine.left == {}


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_the_one_output_has_the_result_of_the_processor(make_llm, kind):
    llm, engine, processor = make_llm()
    (output,) = run(collect(llm, [1, 2], params(3, kind), "a"))
    assert output.request_id == "a"
    assert output.finished
    assert output.error is None
    assert sorted(output.outputs) == [(0, "a-0", [7] * 3), (1, "a-1", [7] * 3)]
    assert processor.ids == ["a", "a"]
    assert_unused(llm, engine)


def test_the_processor_gets_each_output_when_its_request_has_ended(make_llm):
    llm, engine, processor = make_llm()
    engine.steps_left = 0

    async def main():
        task, (first, second, third) = await begin_three(llm, engine, params(9))
        engine.left |= {first: 3, second: 1, third: 2}
        for count in (1, 2, 3):
            engine.steps_left = 1
            await until(lambda count=count: len(processor.received) == count)
        return await task

    (output,) = run(main())
    assert processor.received == [1, 2, 0]
    assert [len(tokens) for *_, tokens in output.outputs] == [1, 2, 3]


def test_a_processor_without_methods_for_coroutines_gets_the_outputs_in_order(make_llm):
    llm, _, _ = make_llm(Plain)
    (output,) = run(collect(llm, [3, 1, 2]))
    assert output.outputs == [3, 1, 2]
    (output,) = run(collect(llm, [4]))  # a prompt instead of a list of prompts
    assert output.outputs == [4]


def test_without_parameters_the_processor_chooses_them(make_llm):
    llm, _, _ = make_llm()
    (output,) = run(collect(llm, [1]))
    assert [len(tokens) for *_, tokens in output.outputs] == [4]


def test_two_run_at_once_beside_other_requests(make_llm):
    llm, engine, _ = make_llm()
    engine.steps_left = 0

    async def main():
        tasks = [asyncio.create_task(collect(llm, [1, 2], params(n))) for n in (2, 3)]
        other = asyncio.create_task(
            anext(llm.generate([5], params(5, RequestOutputKind.FINAL_ONLY)))
        )
        await until(lambda: len(engine.left) == 5)
        engine.steps_left = None
        return [(await task)[0] for task in tasks], await other

    outputs, other = run(main())
    assert len({output.request_id for output in outputs} | {other.request_id}) == 3
    for output, count in zip(outputs, (2, 3), strict=True):
        assert sorted(output.outputs) == [
            (index, f"{output.request_id}-{index}", [7] * count) for index in range(2)
        ]
    assert tokens_of(other) == [7] * 5


def test_an_id_is_in_use_until_the_request_has_ended(make_llm):
    llm, engine, processor = make_llm()
    processor.may_begin.clear()

    async def main():
        task = asyncio.create_task(collect(llm, [1], params(2), "a"))
        await until(llm._requests.ids)
        with pytest.raises(RequestError, match="'a' is in use"):
            await collect(llm, [1], params(2), "a")
        processor.may_begin.set()
        await task
        await collect(llm, [1], params(2), "a")

    run(main())
    assert_unused(llm, engine)


def test_a_cancelled_task_aborts_all_requests(make_llm):
    llm, engine, _ = make_llm()
    engine.steps_left = 1

    async def main():
        task, _ = await begin_three(llm, engine, params(50))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: len(engine.aborted) == 3)

    run(main())
    assert_unused(llm, engine)


def test_a_processor_that_takes_no_further_output_aborts_the_others(make_llm):
    llm, engine, _ = make_llm(Impatient)
    engine.steps_left = 0

    async def main():
        task, (first, second, third) = await begin_three(llm, engine, params(50))
        engine.left[third] = engine.steps_left = 1
        (output,) = await task
        assert output.outputs == 2
        await until(lambda: sorted(engine.aborted) == [first, second])

    run(main())
    assert_unused(llm, engine)


@pytest.mark.parametrize("has_begun", [True, False])
def test_an_aborted_request_has_an_output_without_a_result(make_llm, has_begun):
    llm, engine, processor = make_llm()
    engine.steps_left = 1
    if not has_begun:
        processor.may_begin.clear()

    async def main():
        task = asyncio.create_task(collect(llm, [1, 2], params(50), "a"))
        await until(lambda: len(engine.left) == 2 if has_begun else llm._requests.ids())
        await llm.abort("a")
        (output,) = await task
        assert (output.request_id, output.outputs, output.error) == ("a", None, "aborted")
        assert output.finished
        await until(lambda: len(engine.aborted) == (2 if has_begun else 0))

    run(main())
    assert_unused(llm, engine)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"data": ["x"]}, "Numbers refuses the data: ValueError: no numbers"),
        ({"data": 3}, "Numbers refuses the data: TypeError"),
        ({"data": [1], "prompt": "x"}, "alone"),
        ({"data": [1, 10**4]}, "the prompt has 10,000 tokens"),  # the second prompt is too long
    ],
)
def test_a_wrong_request_is_an_error_and_leaves_nothing(make_llm, prompt, message):
    llm, engine, _ = make_llm()
    engine.steps_left = 0

    async def main():
        with pytest.raises(RequestError, match=message):
            await anext(llm.generate(prompt))
        await until(lambda: not engine.left)

    run(main())
    assert_unused(llm, engine)


def test_a_model_without_processor_says_how_to_name_one(make_async_llm):
    llm, engine = make_async_llm()

    async def main():
        for call in (llm.generate, llm.encode):
            with pytest.raises(EngineStartError, match="name one by io_processor_plugin"):
                await anext(call({"data": [1]}))
        assert len([output async for output in llm.generate([5], params(1))]) == 1

    run(main())
    assert_unused(llm, engine)


def test_an_engine_that_dies_is_an_error(make_llm):
    llm, engine, _ = make_llm()
    engine.steps_left = 0

    async def main():
        task = asyncio.create_task(collect(llm, [1, 2], params(50)))
        await until(lambda: len(engine.left) == 2)
        engine.error = EngineDeadError("gone")
        with pytest.raises(EngineDeadError, match="gone"):
            await task

    run(main())
    assert llm._requests.ids() == []
