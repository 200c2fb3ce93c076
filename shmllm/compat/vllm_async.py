"""`AsyncLLM` with vLLM's options, arguments and attributes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, Self

import shmllm.frontend.async_llm
from shmllm.compat.vllm_engine_args import VllmConfig, config_options, engine_options
from shmllm.compat.vllm_engine_calls import RendererView, release_kv_cache_memory
from shmllm.compat.vllm_names import (
    is_of_engine,
    known,
    supported_tasks,
    usable_priority,
    without_nones,
)
from shmllm.compat.vllm_options import translate
from shmllm.compat.vllm_tokenization import tokenize, tokenize_for_pooling
from shmllm.errors import RequestError
from shmllm.frontend.async_controls import PAUSE_POLL_S
from shmllm.frontend.async_requests import AsyncRequests
from shmllm.frontend.engine_view import EngineView
from shmllm.frontend.pausing import PauseMode
from shmllm.outputs.pooling import PoolingOutput, PoolingRequestOutput
from shmllm.outputs.request import RequestOutput
from shmllm.params.pooling import PoolingParams

logger = logging.getLogger(__name__)

_WITHOUT_EFFECT = ("prompt_text", "trace_headers")
"""Arguments of requests that are ignored: no spans are sent, and a prompt has its text."""

AnyOutput = RequestOutput | PoolingRequestOutput[PoolingOutput]


class RequestOutputCollector:
    """The outputs of a request of `AsyncLLM.add_request`.

    Args:
        request_id: the id of the request.
        outputs: its outputs.

    At most one output is taken from `outputs` before somebody asks for it; all that arrives later
    becomes the next one.
    """

    def __init__(self, request_id: str, outputs: AsyncGenerator[AnyOutput, None]) -> None:
        self.request_id = request_id
        self._outputs = outputs
        self._next: asyncio.Future[AnyOutput] = asyncio.ensure_future(anext(outputs))

    async def get(self) -> AnyOutput:
        """Wait for the next output. After the last one, return that again.

        Raises:
            RequestError: the request was refused.
            StopAsyncIteration: there are no more outputs, and none was the last one; see
                `AsyncLLM.generate` about chunks.
        """
        # Who gives up waiting must not end the request.
        await asyncio.wait([self._next])
        return self._take()

    def get_nowait(self) -> AnyOutput | None:
        """The next output if it is here, or None; raises as `get`."""
        return self._take() if self._next.done() else None

    def _take(self) -> AnyOutput:
        output = self._next.result()
        if not output.finished:
            self._next = asyncio.ensure_future(anext(self._outputs))
        return output


class OutputProcessor:
    """`AsyncLLM.output_processor`: which requests have not ended.

    Args:
        requests: the requests of the AsyncLLM.
    """

    def __init__(self, requests: AsyncRequests) -> None:
        self._requests = requests

    @property
    def request_states(self) -> dict[str, str]:
        """The ids of the unfinished requests, as keys and as values."""
        return {each: each for each in self._requests.ids()}

    def has_request(self, request_id: str) -> bool:
        """Whether the request has not ended."""
        return request_id in self.request_states

    def has_unfinished_requests(self) -> bool:
        """Whether a request has not ended."""
        return bool(self.request_states)

    def get_num_unfinished_requests(self) -> int:
        """The number of requests that have not ended; `n` completions are one request."""
        return len(self.request_states)


class AsyncLLM(shmllm.frontend.async_llm.AsyncLLM):
    """`shmllm.AsyncLLM` with vLLM's options, arguments and attributes.

    Attributes:
        log_stats, logger_manager: as in an engine of vLLM with `disable_log_stats`.
    """

    log_stats = False
    logger_manager = None

    def __init__(self, model: Any = "tiny", executor_class: Any = None, **options: Any) -> None:
        config = options.get("vllm_config", model)
        if executor_class is not None and not isinstance(config, VllmConfig):
            raise TypeError("AsyncLLM() takes executor_class beside a VllmConfig only")
        super().__init__(**translate(engine_options("AsyncLLM", model, options)))

    @classmethod
    def from_vllm_config(cls, vllm_config: Any, **options: Any) -> Self:
        """Starts an engine with the options of `EngineArgs.create_engine_config`. Of vLLM's other
        arguments `stat_loggers` has an effect; unknown ones are a TypeError."""
        return cls(**config_options("AsyncLLM", vllm_config, options))

    @classmethod
    def from_engine_args(
        cls, engine_args: Any, *, stat_loggers: Any = None, **options: Any
    ) -> Self:
        """Starts an engine with these options. `stat_loggers` are ignored: use `get_metrics`."""
        return cls(**engine_args.llm_options())

    def generate(
        self,
        prompt: Any,
        sampling_params: Any = None,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        priority = usable_priority(options.get("priority"), self._llm.facts)
        given = _of_one_engine(options | {"priority": priority}, self._is_pool)
        cut = given.pop("tokenization_kwargs", None)
        (prompt,) = tokenize(self._llm.front_end, [without_nones(prompt)], cut, min_room=1)
        return super().generate(prompt, sampling_params, request_id, **given)

    def encode(
        self,
        prompt: Any,
        pooling_params: Any = None,
        request_id: str | None = None,
        lora_request: Any = None,
        *,
        tokenization_kwargs: Any = None,
        **options: Any,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        given = known(_of_one_engine({"lora_request": lora_request, **options}, self._is_pool))
        prompts, cut = tokenize_for_pooling(
            self._llm.front_end, [without_nones(prompt)], tokenization_kwargs
        )
        return super().encode(prompts[0], pooling_params, request_id, **given, **cut)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """What the engine does: "generate", and pooling tasks."""
        return supported_tasks(self._llm.facts)

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, arrival_time: Any = None, **options: Any
    ) -> RequestOutputCollector:
        """Starts a request, whose outputs the caller reads from the collector. The collector
        raises errors of the request. `arrival_time` is ignored."""
        run: Any = self.encode if isinstance(params, PoolingParams) else self.generate
        collector = RequestOutputCollector(request_id, run(prompt, params, request_id, **options))
        await asyncio.sleep(0)  # so that the request has its id when this returns
        return collector

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Ends requests. A request has one id, so `internal` changes nothing."""
        await super().abort(request_id)

    async def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """As `LLM.collective_rpc` of vLLM's names."""
        if is_of_engine(method, self._llm.facts):
            return [await getattr(self, method)(*args, **kwargs or {})]
        return await super().collective_rpc(method, timeout, args, kwargs)

    async def pause_generation(
        self,
        mode: PauseMode = "abort",
        *,
        wait_for_inflight_requests: bool | None = None,
        clear_cache: bool = True,
    ) -> None:
        """As `shmllm.AsyncLLM.pause_generation`. `wait_for_inflight_requests=True` stands for the
        mode "wait"."""
        chosen: PauseMode = "wait" if wait_for_inflight_requests else mode
        await super().pause_generation(mode=chosen, clear_cache=clear_cache)

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Waits until the requests of this object have ended.

        Raises:
            TimeoutError: some have not, `drain_timeout` seconds later.
        """
        async with asyncio.timeout(drain_timeout):
            while self.output_processor.has_unfinished_requests():
                await asyncio.sleep(PAUSE_POLL_S)

    async def do_log_stats(self) -> None:
        """Writes the counters to the log."""
        logger.info("engine: %s", self.get_metrics())

    def shutdown(self, timeout: float | None = None) -> None:
        super().shutdown()

    def get_tokenizer(self) -> Any:  # a coroutine in shmllm
        """The transformers tokenizer of the model."""
        return self._llm.get_tokenizer()

    def get_num_unfinished_requests(self) -> int:
        """As `output_processor.get_num_unfinished_requests`."""
        return self.output_processor.get_num_unfinished_requests()

    @property
    def output_processor(self) -> OutputProcessor:
        """Which requests have not ended."""
        return OutputProcessor(self._requests)

    @property
    def vllm_config(self) -> Any:
        """As `LLM.llm_engine.vllm_config`."""
        return self._view.vllm_config

    @property
    def model_config(self) -> Any:
        """As `LLM.llm_engine.model_config`."""
        return self._view.model_config

    @property
    def renderer(self) -> RendererView:
        """The tokenizer and the model's configuration."""
        return RendererView(self.model_config, self._llm)

    @property
    def input_processor(self) -> RendererView:
        """As `renderer`."""
        return self.renderer

    async def release_kv_cache_memory(self) -> None:
        """As `LLM.release_kv_cache_memory`."""
        await self._call(lambda: release_kv_cache_memory(self._llm))

    async def is_tracing_enabled(self) -> bool:
        """False: no spans are sent; `shmllm trace` records requests and steps."""
        return False

    @property
    def tokenizer(self) -> Any:
        """As `get_tokenizer`."""
        return self.get_tokenizer()

    @property
    def _is_pool(self) -> bool:
        return self._llm.facts.data_parallel_size > 1

    @property
    def _view(self) -> EngineView:
        return self._llm.llm_engine


def _of_one_engine(options: Mapping[str, Any], is_pool: bool) -> dict[str, Any]:
    """The options that have an effect.

    Args:
        options: vLLM's options.
        is_pool: whether there are several engines.

    Raises:
        RequestError: an option that shmllm does not have.
    """
    rank = options.get("data_parallel_rank")
    if rank not in ((None,) if is_pool else (None, 0)):
        raise RequestError(
            f"data_parallel_rank {rank} is not possible: a pool chooses the engine of a request"
        )
    return known({name: options[name] for name in options if name not in _WITHOUT_EFFECT})
