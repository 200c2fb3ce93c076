"""AsyncIO: the requests of {"data": ...} of an AsyncLLM, each of which consists of other requests.

Each prompt that the IO processor makes is a request with the id "ID-INDEX", as in vLLM. This module
must not know how requests run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from typing import Any

from shmllm.frontend.async_requests import AsyncRequests
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.io_processing import prompts_of_async, result_of_async
from shmllm.frontend.prompts import Prompt
from shmllm.outputs.pooling import PoolingRequestOutput
from shmllm.params.pooling import PoolingParams
from shmllm.params.sampling import RequestOutputKind, SamplingParams
from shmllm.plugins.io_processor import IOProcessor

Processor = IOProcessor[Any, Any]
Prepare = Callable[[Prompt, Any], PreparedRequest]
"""Makes the request for a prompt and its parameters."""
Run = Callable[[Prompt, Any, str], AsyncGenerator[Any, None]]
"""Runs the request for a prompt and its parameters, with this id."""


class AsyncIO:
    """
    Args:
        requests: the requests of the AsyncLLM.
        find_processor: finds the IO processor in another thread.
    """

    def __init__(
        self, requests: AsyncRequests, find_processor: Callable[[], Future[Processor]]
    ) -> None:
        self._requests = requests
        self._find_processor = find_processor

    def generate(
        self,
        request: Mapping[str, Any],
        params: SamplingParams | None,
        request_id: str | None,
        prepare: Prepare,
    ) -> AsyncGenerator[Any, None]:
        """Run a request whose prompts are completed; see `AsyncLLM.generate`."""

        def merge(processor: Processor) -> SamplingParams:
            merged = processor.merge_sampling_params(params).clone()
            merged.output_kind = RequestOutputKind.FINAL_ONLY
            return merged

        def run(prompt: Prompt, merged: Any, own_id: str) -> AsyncGenerator[Any, None]:
            return self._requests.run(partial(prepare, prompt, merged), own_id)

        return self._run(request, request_id, merge, run)

    def encode(
        self,
        request: Mapping[str, Any],
        params: PoolingParams | None,
        request_id: str | None,
        run: Run,
    ) -> AsyncGenerator[Any, None]:
        """Run a request whose prompts are pooled; see `AsyncLLM.encode`. `run` pools one."""

        def merge(processor: Processor) -> PoolingParams:
            return processor.merge_pooling_params(params)

        return self._run(request, request_id, merge, run)

    async def _run(
        self,
        request: Mapping[str, Any],
        request_id: str | None,
        merge: Callable[[Processor], Any],
        run: Run,
    ) -> AsyncGenerator[PoolingRequestOutput[Any], None]:
        async def process(own_id: str) -> PoolingRequestOutput[Any]:
            processor = await asyncio.wrap_future(self._find_processor())
            params = merge(processor)
            prompts = await prompts_of_async(processor, request, own_id)
            runs = [
                run(prompt, params, f"{own_id}-{index}") for index, prompt in enumerate(prompts)
            ]
            async with aclosing(_last_outputs(runs)) as outputs:
                return await result_of_async(processor, outputs, own_id)

        own_id, output = await self._requests.run_task(process, request_id)
        yield output or PoolingRequestOutput(own_id, None, [], error="aborted")


async def _last_outputs(
    runs: Sequence[AsyncGenerator[Any, None]],
) -> AsyncGenerator[tuple[int, Any], None]:
    """Run all at once, and yield the index and the last output of each one when it has ended. The
    others end if one fails, or if the caller leaves."""
    tasks = [asyncio.create_task(_last_output(index, run)) for index, run in enumerate(runs)]
    try:
        for ended in asyncio.as_completed(tasks):
            yield await ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _last_output(index: int, run: AsyncGenerator[Any, None]) -> tuple[int, Any]:
    last = None
    async for output in run:
        last = output
    return index, last
