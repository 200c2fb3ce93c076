"""`AsyncLLM`, the API for coroutines: `async for output in AsyncLLM(...).generate(...)`.

Names and meaning are those of vLLM's class. A thread waits for the engine (see `poll_thread`);
this module contains the part that runs in the event loop.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from shmllm.errors import EngineDeadError
from shmllm.frontend import scoring
from shmllm.frontend.adapters import Adapters
from shmllm.frontend.async_controls import AsyncEngineControls
from shmllm.frontend.async_io import AsyncIO
from shmllm.frontend.async_requests import AsyncRequests
from shmllm.frontend.front_end import Messages
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.io_processing import PLUGIN_TASK, is_data
from shmllm.frontend.llm import LLM
from shmllm.frontend.options.engine_options import takes_llm_options
from shmllm.frontend.poll_thread import PollThread
from shmllm.frontend.pooling.async_pooling import AsyncPooling
from shmllm.frontend.pooling.requests import TextOptions
from shmllm.frontend.priorities import set_priorities
from shmllm.frontend.prompt_chunks import Earlier, PromptChunk, PromptChunks, prepare_chunk
from shmllm.frontend.prompts import Prompt, as_list
from shmllm.frontend.replies.formats import ToolChoice
from shmllm.frontend.replies.parser import Tools
from shmllm.frontend.text.truncation import Side
from shmllm.outputs.pooling import PoolingOutput, PoolingRequestOutput
from shmllm.outputs.request import RequestOutput
from shmllm.params.lora import LoRARequest
from shmllm.params.pooling import PoolingParams
from shmllm.params.sampling import SamplingParams
from shmllm.params.template_kwargs import chat_options


@takes_llm_options
class AsyncLLM(AsyncEngineControls):
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
    def attach(cls, name: str | Sequence[str], **options: Any) -> Self:
        """Use a named engine, or several; see `LLM.attach`."""
        llm = cls.__new__(cls)
        llm._use(LLM.attach(name, **options))
        return llm

    def _use(self, llm: LLM) -> None:
        self._llm = llm
        self._dispatcher = llm.front_end.dispatcher
        self._poll_thread = PollThread(llm.front_end)
        self._requests = AsyncRequests(self._poll_thread, self._dispatcher)
        self._pooling = AsyncPooling(self._requests, llm, self._poll_thread.call)
        self._io = AsyncIO(self._requests, partial(self._poll_thread.call, llm.find_io_processor))
        self.facts = llm.facts
        self._finalizer = weakref.finalize(self, _shut_down, self._poll_thread, llm)

    def generate(
        self,
        prompt: Prompt | PromptChunks,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt.

        Leaving the iterator early, and cancelling the task that runs it, ends the request.

        A prompt may arrive in chunks. The engine completes each chunk in turn, with all earlier
        chunks and their completions, each without its last token, in front of it. Chunks that
        arrive meanwhile wait. An output has the completion of its chunk alone; it has a
        `finish_reason` at the end of the chunk, and is `finished` at the end of the last one if
        the iterator of chunks has ended by then. Such a request has no `n` above 1, no stop strings
        and no FINAL_ONLY.

        Args:
            prompt: one prompt, as for `LLM.generate`, or an asynchronous iterator of prompts or
                PromptChunk objects, which are its chunks; or {"data": ...}, which yields one output
                whose `outputs` is the IO processor's result, or None if it is aborted.
            sampling_params: None takes the defaults. Its `output_kind` decides what the outputs
                contain.
            request_id: an id that is not in use; it is free again when the request has ended.
                None generates one.
            priority: as for `LLM.generate`.
            lora_request: an adapter. The engine reads it when the request arrives, unless it knows
                it; call `add_lora` to read it again (`load_inplace`).

        Yields:
            Outputs as they arrive. All tokens that arrived while the consumer was busy are one
            output.

        Raises:
            RequestError: the prompt, a parameter or the `request_id` is wrong, or the IO processor
                refuses the data.
            EngineStartError: there is no IO processor.
            EngineDeadError: the engine died.
            Exception: whatever the iterator of chunks raised, which ends the request.
        """
        # The generators keep this object alive through these functions.
        prepare = partial(self._prepare, priority=priority, lora=lora_request)
        if isinstance(prompt, AsyncIterator):
            front_end = self._llm.front_end
            has_encoder = front_end.items.num_encoded > 0

            def prepare_next(chunk: Prompt | PromptChunk, before: Earlier) -> PreparedRequest:
                request = prepare_chunk(
                    chunk, before, sampling_params, prepare, has_encoder=has_encoder
                )  # which has the items of all chunks, and with them the adapter for these
                return front_end.adapters.set([request], None)[0]

            return self._requests.run_chunks(prompt, prepare_next, request_id)
        if is_data(prompt):
            return self._io.generate(prompt, sampling_params, request_id, prepare)
        return self._requests.run(partial(prepare, prompt, sampling_params), request_id)

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
        lora_request: LoRARequest | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Tools | None = None,
        tool_choice: ToolChoice = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate the next message of a conversation, as `generate` completes a prompt.

        Args:
            messages: one conversation, a list of {"role": ..., "content": ...}.
            sampling_params, request_id, priority, lora_request: as for `generate`.
            add_generation_prompt, continue_final_message, chat_template, tools, tool_choice,
                chat_template_kwargs: as for `LLM.chat`.

        Yields, raises: as `generate`.
        """
        own = add_generation_prompt, continue_final_message, chat_template, tools, tool_choice

        def prepare() -> PreparedRequest:
            options = chat_options(*own, chat_template_kwargs)
            prompt = self._llm.front_end.chat_prompt(messages, **options)
            return self._prepare(prompt, sampling_params, priority, lora_request)

        return self._requests.run(prepare, request_id)

    def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Side = "right",
        prompt_name: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Compute a vector or scores of a prompt, or run a request of {"data": ...}; see
        `LLM.encode` and `generate`.

        Yields:
            The one output.
        """
        if is_data(prompt) and pooling_task in (None, PLUGIN_TASK):
            return self._io.encode(prompt, pooling_params, request_id, self._pooling.encode)
        options = TextOptions.make(truncate_prompt_tokens, truncation_side, prompt_name)
        return self._pooling.encode(
            prompt, pooling_params, request_id, pooling_task, options, lora_request
        )

    async def score_tokens(
        self,
        prompts: Prompt | Sequence[Prompt],
        completions: Sequence[Sequence[int]],
        *,
        lora_request: Adapters = None,
    ) -> list[list[float]]:
        """Compute the log-probabilities of given completions; see `LLM.score_tokens`."""
        front_end = self._llm.front_end

        def prepare() -> list[PreparedRequest]:
            requests = scoring.prepare(front_end, as_list(prompts), completions)
            return front_end.adapters.set(requests, lora_request)

        requests = await self._call(prepare)
        tasks = [
            self._requests.score(request, len(completion))
            for request, completion in zip(requests, completions, strict=True)
        ]
        return await asyncio.gather(*tasks)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests. Each one that had not ended yields a last output with reason "abort" and
        its tokens so far; ids that are not in use are ignored."""
        self._requests.abort([request_id] if isinstance(request_id, str) else request_id)

    async def get_tokenizer(self) -> Any:
        """The transformers tokenizer of the model."""
        return self._llm.get_tokenizer()

    async def check_health(self) -> None:
        """Raise `dead_error` if no requests can be served."""
        if self.errored:
            raise self.dead_error

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
            self._requests.close()
            self._finalizer.detach()

    close = shutdown

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.shutdown()

    def _prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        priority: int | None,
        lora: LoRARequest | None = None,
    ) -> PreparedRequest:
        front_end = self._llm.front_end
        prepared = front_end.adapters.set(front_end.prepare([prompt], params), lora)
        return set_priorities(prepared, priority, front_end.info)[0]


def _shut_down(poll_thread: PollThread, llm: LLM) -> None:
    poll_thread.stop()
    llm.close()


AsyncLLMEngine = AsyncLLM
