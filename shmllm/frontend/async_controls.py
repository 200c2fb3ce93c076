"""What a front end of coroutines does to its engine beside requests; see `engine_controls`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from shmllm.client.protocol import LoggedError
from shmllm.frontend.async_requests import AsyncRequests
from shmllm.frontend.cancelled_calls import call_in_thread
from shmllm.frontend.dispatcher import Dispatcher
from shmllm.frontend.llm import LLM
from shmllm.frontend.pausing import PauseMode, fall_asleep, next_or_value, pause, resume
from shmllm.frontend.poll_thread import PollThread
from shmllm.frontend.weights.async_controls import AsyncWeightControls
from shmllm.frontend.weights.controls import CALLED_BY_NAME
from shmllm.outputs.sleep_report import SleepReport
from shmllm.params.lora import LoRARequest

Result = TypeVar("Result")

PAUSE_POLL_S = 0.01


class AsyncEngineControls(AsyncWeightControls):
    """The methods of `AsyncLLM` that are not about requests."""

    _llm: LLM
    _dispatcher: Dispatcher
    _poll_thread: PollThread
    _requests: AsyncRequests

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """See `LLM.collective_rpc`."""
        call = partial(self._llm.collective_rpc, method, timeout, args, kwargs)
        if isinstance(method, str) and method in CALLED_BY_NAME:
            return await call_in_thread(call)  # it may wait for a trainer
        return await self._call(call)

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> str:
        """See `LLM.start_profile`."""
        start = partial(
            self._llm.start_profile,
            profile_prefix,
            delay_iterations=delay_iterations,
            max_iterations=max_iterations,
        )
        return await self._call(start)

    async def stop_profile(self) -> str:
        """See `LLM.stop_profile`."""
        return await self._call(self._llm.stop_profile)

    async def add_lora(
        self,
        lora_request: LoRARequest,
        *,
        tensors: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> bool:
        """See `LLM.add_lora`."""
        add = partial(self._llm.add_lora, lora_request, tensors=tensors, config=config)
        return await self._call(add)

    async def remove_lora(self, lora_id: int) -> bool:
        """See `LLM.remove_lora`."""
        return await self._call(lambda: self._llm.remove_lora(lora_id))

    async def list_loras(self) -> set[int]:
        """See `LLM.list_loras`."""
        return await self._call(self._llm.list_loras)

    async def pin_lora(self, lora_id: int) -> bool:
        """See `LLM.pin_lora`."""
        return await self._call(lambda: self._llm.pin_lora(lora_id))

    async def pause_generation(
        self, mode: PauseMode = "abort", *, clear_cache: bool = True
    ) -> None:
        """Pause the engine until `resume_generation`; see `LLM.pause_generation`. Calls of
        `generate` wait meanwhile."""
        if mode == "wait":
            self._requests.hold()
        steps = pause(self._dispatcher, mode, clear_cache)
        while await self._call(lambda: next(steps, True)) is None:
            await asyncio.sleep(PAUSE_POLL_S)

    async def resume_generation(self) -> bool:
        """End the pause. Returns whether the engine continues: another front end may have paused
        it as well."""
        goes_on = await self._call(lambda: resume(self._dispatcher))
        self._requests.release()
        return goes_on

    async def is_paused(self) -> bool:
        """Whether a front end has paused the engine, or the engine sleeps. The calls of other
        coroutines that came before this one have reached the engine."""
        return await self._call(self._llm.is_paused)

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> SleepReport:
        """Release memory of the engine until `wake_up`; see `LLM.sleep`."""
        steps = fall_asleep(self._dispatcher.call, level, mode)
        try:
            while (report := await self._call(lambda: next_or_value(steps))) is None:
                await asyncio.sleep(PAUSE_POLL_S)
            return report
        except asyncio.CancelledError:
            self._poll_thread.call(steps.close)  # here it would hold the event loop up
            raise

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Wake the engine up, or parts of it; see `LLM.wake_up`."""
        return await self._call(lambda: self._llm.wake_up(tags))

    async def is_sleeping(self) -> bool:
        """Whether a part of the engine sleeps."""
        return self._llm.is_sleeping()

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prefixes; see `LLM.reset_prefix_cache`."""
        return await self._call(
            lambda: self._llm.reset_prefix_cache(reset_running_requests, reset_connector)
        )

    async def reset_mm_cache(self) -> None:
        """Forget prepared images; see `LLM.reset_mm_cache`."""
        await self._call(self._llm.reset_mm_cache)

    async def reset_encoder_cache(self) -> None:
        """Forget the embeddings of images; see `LLM.reset_encoder_cache`."""
        await self._call(self._llm.reset_encoder_cache)

    def get_metrics(self) -> dict[str, int]:
        """See `LLM.get_metrics`."""
        return self._llm.get_metrics()

    def engine_errors(self) -> list[LoggedError]:
        """See `LLM.engine_errors`."""
        return self._llm.engine_errors()

    async def _call(self, function: Callable[[], Result]) -> Result:
        return await asyncio.wrap_future(self._poll_thread.call(function))
