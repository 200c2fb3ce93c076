"""AsyncPooling: the pooling requests of an AsyncLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace

from shmllm.frontend.async_requests import AsyncRequests
from shmllm.frontend.llm import LLM
from shmllm.frontend.pooling.requests import (
    ABORTED,
    Output,
    PoolingRequest,
    TextOptions,
    adapt,
    join,
    pooling_output,
    prepare,
)
from shmllm.frontend.prompts import Prompt
from shmllm.outputs.pooling import PoolingOutput, PoolingRequestOutput
from shmllm.params.lora import LoRARequest
from shmllm.params.pooling import PoolingParams

Call = Callable[[Callable[[], list[PoolingRequest]]], Future[list[PoolingRequest]]]


class AsyncPooling:
    """
    Args:
        requests: the requests of the AsyncLLM.
        llm: the LLM that it uses.
        call: runs a function in the thread that sends requests.
    """

    def __init__(self, requests: AsyncRequests, llm: LLM, call: Call) -> None:
        self._requests = requests
        self._llm = llm
        self._call = call

    def encode(
        self,
        prompt: Prompt,
        params: PoolingParams | None,
        request_id: str | None,
        task: str | None = None,
        options: TextOptions | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Run a request and yield its output; see `AsyncLLM.encode`."""
        llm = self._llm

        def make() -> list[PoolingRequest]:
            front_end, model = llm.front_end, llm.pooled_model
            requests = prepare(front_end, model, [prompt], params, task, options)
            adapt(requests, lora_request, front_end.adapters)
            return requests

        if llm.pooler_config.enable_chunked_processing:
            return self._divided(make, request_id)
        return self._one(lambda: make()[0], request_id)

    async def _one(
        self, make: Callable[[], PoolingRequest], request_id: str | None
    ) -> AsyncGenerator[Output, None]:
        async with aclosing(self._requests.ended(make, request_id)) as ended:
            async for state in ended:
                yield pooling_output(state, self._llm.kept_queries)

    async def _divided(
        self, make: Callable[[], list[PoolingRequest]], request_id: str | None
    ) -> AsyncGenerator[Output, None]:
        """Run a request that may be divided into several."""

        async def process(own_id: str) -> Output:
            requests = await asyncio.wrap_future(self._call(make))
            parts = [
                self._part(request, f"{own_id}-{index}") for index, request in enumerate(requests)
            ]
            (output,) = join(await asyncio.gather(*parts), requests)
            return replace(output, request_id=own_id)

        own_id, output = await self._requests.run_task(process, request_id)
        yield output or _aborted(own_id)

    async def _part(self, request: PoolingRequest, request_id: str) -> Output:
        async with aclosing(self._one(lambda: request, request_id)) as outputs:
            return await anext(outputs)


def _aborted(request_id: str) -> Output:
    nothing = PoolingOutput.empty()
    return PoolingRequestOutput(request_id, nothing, [], error=ABORTED, is_aborted=True)
