"""AsyncRequests: the unfinished requests of an AsyncLLM by their ids, and their outputs.

This is the part of AsyncLLM between its poll thread and the coroutines that wait for outputs. It
must not know how prompts become requests: callers pass a function that prepares one, which the poll
thread calls.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from shmllm.errors import RequestError
from shmllm.frontend.dispatcher import Dispatcher
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.poll_thread import PollThread
from shmllm.frontend.prompt_chunks import ChunkReader, Earlier, PromptChunk, PromptChunks
from shmllm.frontend.prompts import Prompt
from shmllm.frontend.request_output_queue import RequestOutputQueue
from shmllm.frontend.request_state import RequestState
from shmllm.frontend.scoring import scores_of
from shmllm.outputs.request import CompletionOutput, RequestOutput

Result = TypeVar("Result")
Prepare = Callable[[], PreparedRequest]
PrepareChunk = Callable[[Prompt | PromptChunk, Earlier], PreparedRequest]
"""Makes the request for a chunk, given the tokens in front of it."""

ABORT = "abort"


@dataclass(slots=True)
class OpenRequest:
    """A request that has not ended.

    Attributes:
        request_id: its id, which is in use until its last output is taken.
        queue: its outputs.
        reader: reads the chunks of its prompt; None if the prompt was given at once.
        task: runs the requests that it consists of, instead of the engine; None if it is only one.
    """

    request_id: str
    queue: RequestOutputQueue
    reader: ChunkReader | None = None
    task: asyncio.Task[Any] | None = None


class AsyncRequests:
    """
    Args:
        poll_thread: submits and aborts the requests.
        dispatcher: the dispatcher that the thread polls with.
    """

    def __init__(self, poll_thread: PollThread, dispatcher: Dispatcher) -> None:
        self._poll_thread = poll_thread
        self._dispatcher = dispatcher
        self._open: dict[str, OpenRequest] = {}
        self._ids = itertools.count()
        self._released: asyncio.Event | None = None

    def ids(self) -> list[str]:
        """The ids in use, in the order in which their requests came."""
        return list(self._open)

    async def run(
        self, prepare: Prepare, request_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request and yield its outputs; see `AsyncLLM.generate`."""
        await self._until_released()
        with self._opened(request_id) as request:
            self._poll_thread.submit(request.queue, prepare, request.request_id)
            is_finished = False
            while not is_finished:
                output = await self._next_output(request)
                is_finished = output.finished
                yield output

    async def ended(
        self, prepare: Prepare, request_id: str | None
    ) -> AsyncGenerator[RequestState, None]:
        """Run a pooling request, and yield its state when it has ended."""
        await self._until_released()
        with self._opened(request_id) as request:
            self._poll_thread.submit(request.queue, prepare, request.request_id)
            await self._next_output(request)
            yield request.queue.states[0]

    async def score(self, prepared: PreparedRequest, length: int) -> list[float]:
        """Run a request that `scoring.prepare` made, and return the scores of its last `length`
        tokens; see `AsyncLLM.score_tokens`."""
        await self._until_released()
        with self._opened(None) as request:
            self._poll_thread.submit(request.queue, lambda: prepared, request.request_id)
            while not (await self._next_output(request)).finished:
                pass
            return scores_of(request.queue.states[0], length)

    async def run_chunks(
        self, chunks: PromptChunks, prepare: PrepareChunk, request_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete each chunk of a prompt, one after another; see `AsyncLLM.generate`.

        Each chunk is a request of its own in the engine. Its prompt is everything in front of its
        completion, so that most of it is a prefix-cache hit.
        """
        await self._until_released()
        with (
            self._opened(request_id) as request,
            closing(ChunkReader(chunks, partial(self._abort, request))) as reader,
        ):
            request.reader = reader
            before = Earlier()
            while (chunk := await self._next_chunk(reader)) is not None:
                await self._until_released()
                if reader.is_aborted:
                    break
                self._poll_thread.submit(
                    request.queue, partial(prepare, chunk, before), request.request_id
                )
                has_ended = False
                while not has_ended:
                    output = await self._next_output(request)
                    reader.raise_error()
                    has_ended = output.outputs[0].finished()
                    yield output
                if output.finished:
                    return
                state = request.queue.states[0]
                # As in vLLM, which has not computed the last token's keys and values.
                token_ids = state.request.prompt_token_ids + state.token_ids[:-1]
                before = Earlier(token_ids, state.request.submitted.items)
            if reader.is_aborted:
                completion = CompletionOutput(0, "", [], finish_reason=ABORT)
                ids = list(before.token_ids)
                yield RequestOutput(request.request_id, None, ids, None, [completion], True)

    async def run_task(
        self, function: Callable[[str], Coroutine[Any, Any, Result]], request_id: str | None
    ) -> tuple[str, Result | None]:
        """Run a coroutine as a request, which ends if the coroutine that waits for it ends.

        Args:
            function: returns the coroutine, given the id of the request.
            request_id: as for `run`.

        Returns:
            The id of the request, and the result of the coroutine; None if `abort` ended it.
        """
        with self._opened(request_id) as request:
            task = request.task = asyncio.create_task(function(request.request_id))
            await asyncio.gather(task, return_exceptions=True)  # if cancelled, cancels the task
            return request.request_id, None if task.cancelled() else task.result()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests; see `AsyncLLM.abort`."""
        for request_id in request_ids:
            if (request := self._open.get(request_id)) is None:
                continue
            if request.task is not None:
                request.task.cancel()
                continue
            if request.reader is not None:
                request.reader.abort()
            self._poll_thread.abort(request.queue)

    def hold(self) -> None:
        """Let new requests wait until `release`."""
        if self._released is None:
            self._released = asyncio.Event()

    def release(self) -> None:
        """End `hold`."""
        if self._released is not None:
            self._released.set()
            self._released = None

    def close(self) -> None:
        """End the waiting for chunks, after the poll thread has ended; any thread may call this.
        The thread itself ends the other waiting."""
        for request in list(self._open.values()):
            if request.reader is not None and not request.queue.loop.is_closed():
                request.queue.loop.call_soon_threadsafe(request.reader.close)

    async def _until_released(self) -> None:
        while self._released is not None:
            await self._released.wait()

    async def _next_chunk(self, reader: ChunkReader) -> Prompt | PromptChunk | None:
        chunk = await reader.next()
        self._poll_thread.check_alive()
        return chunk

    async def _next_output(self, request: OpenRequest) -> RequestOutput:
        """Wait for the next output of the submitted request, which may be a chunk of `request`."""
        output = None
        while output is None:
            output = await request.queue.take(self._dispatcher.reading())
        if output.finished and request.reader is not None:
            is_aborted = output.outputs[0].finish_reason == ABORT
            output.finished = is_aborted or request.reader.is_exhausted
        if output.finished:
            del self._open[request.request_id]
        return output

    @contextmanager
    def _opened(self, request_id: str | None) -> Iterator[OpenRequest]:
        """Take an id for a request. The request is dropped if it has not ended in the block."""
        if request_id is None:
            request_id = next(n for i in self._ids if (n := f"request-{i}") not in self._open)
        if request_id in self._open:
            raise RequestError(f"request_id {request_id!r} is in use by a request that still runs")
        request = self._open[request_id] = OpenRequest(request_id, RequestOutputQueue())
        try:
            yield request
        finally:
            if self._open.get(request_id) is request:
                del self._open[request_id]
                if self._poll_thread.error is None:
                    self._poll_thread.discard(request.queue)

    def _abort(self, request: OpenRequest) -> None:
        if self._poll_thread.error is None:
            self._poll_thread.abort(request.queue)
