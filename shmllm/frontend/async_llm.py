"""`AsyncLLM`, the API for coroutines: `async for output in AsyncLLM(...).generate(...)`.

Names and meaning are those of vLLM's class. A thread waits for the engine (see `poll_thread`);
this module contains the part that runs in the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self, TypeVar

from shmllm.client.protocol import LoggedError
from shmllm.errors import EngineDeadError, RequestError
from shmllm.frontend import pooling
from shmllm.frontend.engine_options import takes_llm_options
from shmllm.frontend.front_end import Messages
from shmllm.frontend.input_processor import PreparedRequest, Prompt, set_priorities
from shmllm.frontend.llm import LLM
from shmllm.frontend.pausing import PauseMode, fall_asleep, next_or_value, pause, resume
from shmllm.frontend.poll_thread import PollThread
from shmllm.frontend.request_output_queue import RequestOutputQueue
from shmllm.frontend.weight_push import NamedTensors, UpdateMode, Version
from shmllm.outputs.pooling import PoolingOutput, PoolingRequestOutput
from shmllm.outputs.request import RequestOutput
from shmllm.outputs.sleep_report import SleepReport
from shmllm.params.pooling import PoolingParams
from shmllm.params.sampling import SamplingParams

Result = TypeVar("Result")

PAUSE_POLL_S = 0.01


@takes_llm_options
class AsyncLLM:
    """A model and the engine process that runs it, for coroutines.

    Args:
        options: see below.
        options of vLLM that are not listed: as for `LLM`.

    Raises:
        as `LLM`.

    It may be made outside of an event loop, and used from one after another.
    """

    def __init__(self, model: str = "tiny", **options: Any) -> None:
        self._use(LLM(model, **options))

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> Self:
        """Create an AsyncLLM from an AsyncEngineArgs."""
        return cls(**engine_args.llm_options())

    @classmethod
    def attach(cls, name: str, *, generation_config: str = "auto") -> Self:
        """Use a named engine; see `LLM.attach`."""
        llm = cls.__new__(cls)
        llm._use(LLM.attach(name, generation_config=generation_config))
        return llm

    def _use(self, llm: LLM) -> None:
        self._llm = llm
        self._dispatcher = llm.front_end.dispatcher
        self._poll_thread = PollThread(llm.front_end)
        self._queues: dict[str, RequestOutputQueue] = {}
        self._ids = itertools.count()
        self._resumed: asyncio.Event | None = None
        self.facts = llm.facts
        self._finalizer = weakref.finalize(self, _shut_down, self._poll_thread, llm)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt.

        Leaving the iterator early, and cancelling the task that runs it, ends the request.

        Args:
            prompt: one prompt, as for `LLM.generate`.
            sampling_params: None takes the defaults. Its `output_kind` decides what the outputs
                contain.
            request_id: an id that is not in use; it is free again when the request has ended.
                None generates one.
            priority: as for `LLM.generate`.

        Yields:
            Outputs as they arrive. All tokens that arrived while the consumer was busy are one
            output.

        Raises:
            RequestError: the prompt, a parameter or the `request_id` is wrong.
            EngineDeadError: the engine died.
        """
        return self._outputs(partial(self._prepare, prompt, sampling_params, priority), request_id)

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate the next message of a conversation, as `generate` completes a prompt.

        Args:
            messages: one conversation, a list of {"role": ..., "content": ...}.
            sampling_params, request_id, priority: as for `generate`.
            add_generation_prompt, continue_final_message, chat_template, tools,
                chat_template_kwargs: as for `LLM.chat`.

        Yields, raises: as `generate`.
        """
        options = {
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
            "chat_template": chat_template,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }

        def prepare() -> PreparedRequest:
            prompt = self._llm.front_end.chat_prompt(messages, **options)
            return self._prepare(prompt, sampling_params, priority)

        return self._outputs(prepare, request_id)

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Compute a vector of a prompt; see `LLM.encode` and `generate`.

        Yields:
            The one output.
        """
        while self._resumed is not None:
            await self._resumed.wait()
        queue = RequestOutputQueue()
        name = self._register(request_id, queue)
        try:
            self._poll_thread.submit(
                queue, lambda: self._prepare_pooling(prompt, pooling_params), name
            )
            while await queue.take(self._dispatcher.reading()) is None:
                pass
            del self._queues[name]
            yield pooling.pooling_output(queue.states[0])
        finally:
            if self._queues.get(name) is queue:
                del self._queues[name]
                self._drop(queue)

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """See `LLM.collective_rpc`."""
        return await self._call(lambda: self._llm.collective_rpc(method, timeout, args, kwargs))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests. Each one that had not ended yields a last output with reason "abort" and
        its tokens so far; ids that are not in use are ignored."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if (queue := self._queues.get(name)) is not None:
                self._poll_thread.abort(queue)

    async def pause_generation(
        self, *, mode: PauseMode = "abort", clear_cache: bool = True
    ) -> None:
        """Pause the engine until `resume_generation`; see `LLM.pause_generation`. Calls of
        `generate` wait meanwhile."""
        if mode == "wait" and self._resumed is None:
            self._resumed = asyncio.Event()
        steps = pause(self._dispatcher, mode, clear_cache)
        while await self._call(lambda: next(steps, True)) is None:
            await asyncio.sleep(PAUSE_POLL_S)

    async def resume_generation(self) -> bool:
        """End the pause. Returns whether the engine continues: another front end may have paused
        it as well."""
        goes_on = await self._call(lambda: resume(self._dispatcher))
        if self._resumed is not None:
            self._resumed.set()
            self._resumed = None
        return goes_on

    async def is_paused(self) -> bool:
        """Whether a front end has paused the engine, or the engine sleeps."""
        return self._llm.is_paused()

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
        return await self._call(lambda: self._llm.reset_prefix_cache(reset_running_requests))

    async def update_weights(
        self,
        weights: NamedTensors,
        *,
        version: Version | None = None,
        mode: UpdateMode = "keep",
        reset_prefix_cache: bool = True,
    ) -> None:
        """See `LLM.update_weights`. Requests and other coroutines continue meanwhile; a generator
        of weights runs in another thread."""
        await asyncio.to_thread(
            self._llm.update_weights,
            weights,
            version=version,
            mode=mode,
            reset_prefix_cache=reset_prefix_cache,
        )

    async def start_weight_update(self) -> None:
        """See `LLM.start_weight_update`."""
        await asyncio.to_thread(self._llm.start_weight_update)

    async def finish_weight_update(
        self,
        version: Version | None = None,
        *,
        mode: UpdateMode = "keep",
        reset_prefix_cache: bool = True,
    ) -> None:
        """See `LLM.finish_weight_update`."""
        await asyncio.to_thread(
            self._llm.finish_weight_update,
            version,
            mode=mode,
            reset_prefix_cache=reset_prefix_cache,
        )

    async def abandon_weight_update(self) -> None:
        """See `LLM.abandon_weight_update`."""
        await asyncio.to_thread(self._llm.abandon_weight_update)

    async def get_weight_version(self) -> Version:
        """See `LLM.get_weight_version`."""
        return await asyncio.to_thread(self._llm.get_weight_version)

    async def get_tokenizer(self) -> Any:
        """The transformers tokenizer of the model."""
        return self._llm.get_tokenizer()

    async def check_health(self) -> None:
        """Raise `dead_error` if no requests can be served."""
        if self.errored:
            raise self.dead_error

    def get_metrics(self) -> dict[str, int]:
        """See `LLM.get_metrics`."""
        return self._llm.get_metrics()

    def engine_errors(self) -> list[LoggedError]:
        """See `LLM.engine_errors`."""
        return self._llm.engine_errors()

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters that `generate` uses without `sampling_params`."""
        return self._llm.get_default_sampling_params()

    @property
    def is_running(self) -> bool:
        """Whether requests can be served."""
        return not self.errored

    @property
    def errored(self) -> bool:
        """Whether the engine died or was shut down."""
        return self._poll_thread.error is not None or self._llm._client.health() == "dead"

    @property
    def is_stopped(self) -> bool:
        """The same as `errored`."""
        return self.errored

    @property
    def dead_error(self) -> BaseException:
        """The error because of which no requests can be served."""
        return self._poll_thread.error or EngineDeadError("the engine process died")

    def shutdown(self) -> None:
        """End the engine, or disconnect from a named one. Waiting callers get an error.
        Idempotent."""
        # As in `ChannelEngineClient.close`.
        alive = self._finalizer.peek()
        if alive is not None:
            _shut_down(*alive[2])
            self._finalizer.detach()

    close = shutdown

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.shutdown()

    async def _outputs(
        self, prepare: Callable[[], PreparedRequest], request_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run the request that `prepare` makes; see `generate`."""
        while self._resumed is not None:
            await self._resumed.wait()
        queue = RequestOutputQueue()
        name = self._register(request_id, queue)
        is_finished = False
        try:
            self._poll_thread.submit(queue, prepare, name)
            while not is_finished:
                output = await queue.take(self._dispatcher.reading())
                if output is None:
                    continue
                is_finished = output.finished
                if is_finished:
                    del self._queues[name]
                yield output
        finally:
            if self._queues.get(name) is queue:
                del self._queues[name]
                self._drop(queue)

    def _prepare(
        self, prompt: Prompt, params: SamplingParams | None, priority: int | None
    ) -> PreparedRequest:
        front_end = self._llm.front_end
        prepared = front_end.prepare([prompt], params)
        return set_priorities(prepared, priority, front_end.info)[0]

    def _prepare_pooling(self, prompt: Prompt, params: PoolingParams | None) -> PreparedRequest:
        llm = self._llm
        return pooling.prepare(llm.front_end, [prompt], params, llm.pooler_config)[0]

    def _register(self, request_id: str | None, queue: RequestOutputQueue) -> str:
        if request_id is None:
            request_id = next(
                name for n in self._ids if (name := f"request-{n}") not in self._queues
            )
        if request_id in self._queues:
            raise RequestError(f"request_id {request_id!r} is in use by a request that still runs")
        self._queues[request_id] = queue
        return request_id

    def _drop(self, queue: RequestOutputQueue) -> None:
        if self._poll_thread.error is None:
            self._poll_thread.discard(queue)

    async def _call(self, function: Callable[[], Result]) -> Result:
        return await asyncio.wrap_future(self._poll_thread.call(function))


def _shut_down(poll_thread: PollThread, llm: LLM) -> None:
    poll_thread.stop()
    llm.close()


AsyncLLMEngine = AsyncLLM
