"""AsyncLLM as programs written for vLLM use it, with a fake engine whose tokens are all 7."""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest
from support.fakes import FakeEngineClient

from shmllm.compat import vllm as shim
from shmllm.compat import vllm_engine, vllm_engine_args
from shmllm.errors import RequestError
from shmllm.frontend import front_end
from shmllm.params.pooling import PoolingParams
from shmllm.params.sampling import RequestOutputKind, SamplingParams
from shmllm.wire.messages import Method

LIMIT_S = 30.0
DELTA = RequestOutputKind.DELTA


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngineClient:
    engine = FakeEngineClient(1)
    monkeypatch.setattr(front_end, "start_engine", lambda *_: engine)
    return engine


@pytest.fixture
def llm(engine: FakeEngineClient) -> Iterator[Any]:
    shim.install()
    args = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs(model="tiny")
    llm = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args(args)
    yield llm
    llm.shutdown()
    shim.uninstall()


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, output_kind=DELTA)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_the_output_processor_knows_the_unfinished_requests(llm: Any) -> None:
    processor = llm.output_processor

    async def main() -> None:
        assert not processor.has_unfinished_requests()
        async for _ in llm.generate([5], params(3), "a", data_parallel_rank=0):
            if processor.has_unfinished_requests():  # not at the last output
                assert list(processor.request_states) == ["a"]
                assert processor.has_request("a")
                assert processor.get_num_unfinished_requests() == 1
                assert llm.get_num_unfinished_requests() == 1
        assert not processor.has_unfinished_requests()

    run(main())


def test_prompts_are_cut(llm: Any, engine: FakeEngineClient) -> None:
    async def main() -> None:
        given = {"truncate_prompt_tokens": 2}
        options = {"tokenization_kwargs": given, "trace_headers": {"a": "b"}, "prompt_text": "x"}
        async for output in llm.generate([5, 6, 7], params(1), "a", **options):
            assert output.prompt_token_ids == [6, 7]
        vector = llm.encode([5, 6], PoolingParams(task="embed"), "b", priority=0, trace_headers={})
        await vector.aclose()

    run(main())


def test_an_abort_takes_internal_ids(llm: Any, engine: FakeEngineClient) -> None:
    engine.steps_left = 1

    async def main() -> None:
        collector = await llm.add_request("a", [5], params(50))
        await collector.get()
        await llm.abort([collector.request_id], internal=True)
        last = await collector.get()
        assert last.finished
        assert last.outputs[0].finish_reason == "abort"
        assert not llm.output_processor.has_unfinished_requests()

    run(main())


def test_it_waits_until_no_request_is_left(llm: Any, engine: FakeEngineClient) -> None:
    engine.steps_left = 1

    async def main() -> None:
        await llm.wait_for_requests_to_drain()
        collector = await llm.add_request("a", [5], params(2))
        with pytest.raises(TimeoutError):
            await llm.wait_for_requests_to_drain(drain_timeout=0.02)
        engine.steps_left = None
        reading = asyncio.ensure_future(collector.get())
        await llm.wait_for_requests_to_drain()
        await reading

    run(main())


def test_caches_of_items_are_reset(
    llm: Any, engine: FakeEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared: list[None] = []
    monkeypatch.setattr(llm._llm.front_end.items, "clear", lambda: cleared.append(None))

    async def main() -> None:
        await llm.reset_mm_cache()
        await llm.reset_encoder_cache()

    run(main())
    assert cleared == [None]
    assert engine.calls == [(Method.RESET_ENCODER_CACHE, None)]


def test_a_collector_has_the_outputs_of_its_request(llm: Any, engine: FakeEngineClient) -> None:
    engine.steps_left = 1

    async def main() -> None:
        collector = await llm.add_request("a", [5], params(50), priority=0)
        assert llm.output_processor.has_request("a")
        assert (await collector.get()).outputs[0].token_ids == [7]
        assert collector.get_nowait() is None
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(collector.get(), 0.01)
        engine.steps_left = None
        num_tokens, output = 1, None
        while output is None or not output.finished:
            output = collector.get_nowait() or await collector.get()
            num_tokens += len(output.outputs[0].token_ids)
        assert num_tokens == 50

    run(main())


def test_a_collector_raises_what_is_wrong_with_the_request(llm: Any) -> None:
    async def main() -> None:
        for prompt, own in (([], params(3)), ([5], PoolingParams(dimensions=10**9))):
            collector = await llm.add_request("a", prompt, own)
            with pytest.raises(RequestError):
                await collector.get()

    run(main())


def test_streaming_inputs_are_chunks(llm: Any) -> None:
    streaming_input = importlib.import_module("vllm.engine.protocol").StreamingInput

    async def inputs() -> AsyncIterator[Any]:
        yield streaming_input(prompt=[5, 6])
        yield streaming_input(prompt=[8], sampling_params=params(1))

    async def main() -> None:
        outputs = [output async for output in llm.generate(inputs(), params(2), "a")]
        assert outputs[-1].prompt_token_ids == [5, 6, 7, 8]
        assert outputs[-1].finished

    run(main())


def test_a_rank_of_another_engine_is_refused(llm: Any) -> None:
    with pytest.raises(RequestError, match="data_parallel_rank 1 is not possible"):
        llm.generate([5], params(1), "a", data_parallel_rank=1)


def test_what_servers_read(llm: Any, caplog: pytest.LogCaptureFixture) -> None:
    llm._llm.get_tokenizer = lambda: "the tokenizer"
    assert llm.model_config.max_model_len == llm.vllm_config.model_config.max_model_len == 64
    assert llm.get_tokenizer() == llm.tokenizer == "the tokenizer"
    assert llm.logger_manager is None
    llm.get_metrics = lambda: {"running": 3}
    with caplog.at_level(logging.INFO):
        run(llm.do_log_stats())
    assert "{'running': 3}" in caplog.text


def test_a_priority_without_effect_is_a_warning(llm: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async for _ in llm.generate([5], params(1), "a", priority=0):
            pass
        assert "priority" not in caplog.text
        async for _ in llm.generate([5], params(1), "b", priority=3):
            pass
        assert "priority has no effect" in caplog.text

    run(main())


def test_an_engine_starts_with_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in programs that derive a class of AsyncLLMEngine, or create the configuration first."""
    seen: list[Any] = []
    fake = FakeEngineClient(1)
    monkeypatch.setattr(front_end, "start_engine", lambda *given: seen.append(given[1]) or fake)
    shim.install()
    try:
        args = importlib.import_module("vllm").AsyncEngineArgs(model="tiny", max_num_seqs=3)
        module = importlib.import_module("vllm.v1.engine.async_llm")
        executor = importlib.import_module("vllm.v1.executor").Executor
        config = args.create_engine_config()
        own = {"executor_class": executor.get_class(config), "log_requests": False}
        for start in (
            lambda: module.AsyncLLM(vllm_config=config, log_stats=True, **own),
            lambda: module.AsyncLLM(config, executor),
            lambda: module.AsyncLLM.from_vllm_config(vllm_config=config, disable_log_stats=True),
        ):
            llm = start()
            llm.shutdown()
            assert seen.pop().scheduler.max_num_seqs == 3
        with pytest.raises(TypeError, match="log_request'; the nearest option is 'log_requests'"):
            module.AsyncLLM(vllm_config=config, log_request=True)
        with pytest.raises(TypeError, match=r"LLMEngine.*'log_request'"):
            vllm_engine.LLMEngine.from_vllm_config(config, log_request=True)
        for engine in (module.AsyncLLM, vllm_engine.LLMEngine):
            with pytest.raises(TypeError, match="create_engine_config returns, got dict"):
                engine.from_vllm_config({})
        with pytest.raises(TypeError, match="executor_class beside a VllmConfig"):
            module.AsyncLLM("tiny", executor)
        given = vllm_engine_args.config_options("AsyncLLM", config, {"stat_loggers": [dict]})
        assert given["stat_loggers"] == [dict]
    finally:
        shim.uninstall()
