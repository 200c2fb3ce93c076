"""Prompts that arrive in chunks: what a program yields, and the task that reads it.

This module must not know how a chunk is completed; see `AsyncRequests.run_chunks`.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from shmllm.errors import RequestError
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.prompts import Prompt, TokensPrompt
from shmllm.params.items import Item
from shmllm.params.sampling import RequestOutputKind, SamplingParams


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The next part of a prompt that arrives in chunks.

    Attributes:
        prompt: text or token ids, perhaps with items, as for `AsyncLLM.generate`. Text is tokenized
            as a prompt of its own, with the special tokens that a tokenizer adds in front of one.
        sampling_params: for the completion of this chunk; None takes those of the call.
    """

    prompt: Prompt
    sampling_params: SamplingParams | None = None


@dataclass(frozen=True, slots=True)
class Earlier:
    """What stands in front of a chunk.

    Attributes:
        token_ids: the tokens of all earlier chunks and their completions.
        items: the items of the chunks, at their places among these.
    """

    token_ids: Sequence[int] = ()
    items: tuple[Item, ...] = ()


PromptChunks = AsyncIterator[Prompt | PromptChunk]
PrepareOne = Callable[[Prompt, SamplingParams | None], PreparedRequest]


def prepare_chunk(
    chunk: Prompt | PromptChunk,
    before: Earlier,
    params: SamplingParams | None,
    prepare: PrepareOne,
    *,
    has_encoder: bool = False,
) -> PreparedRequest:
    """Make the request that completes a chunk.

    Args:
        chunk: the chunk.
        before: what stands in front of it.
        params: the parameters, unless the chunk has its own.
        prepare: checks and tokenizes a prompt with its parameters.
        has_encoder: whether the model is an encoder-decoder, whose prompts begin with one item.

    Raises:
        RequestError: the chunk or a parameter is wrong, or there are too many tokens by now.
    """
    given = chunk if isinstance(chunk, PromptChunk) else PromptChunk(chunk)
    own = given.sampling_params or params
    request = prepare(given.prompt, _without_places(own) if own and before.token_ids else own)
    _check(request, has_encoder)
    if not before.token_ids:
        return request
    whole: TokensPrompt = {
        "prompt_token_ids": [*before.token_ids, *request.prompt_token_ids],
        "cache_salt": request.submitted.cache_salt,
    }
    if request.prompt is not None:
        whole["prompt"] = request.prompt
    found = prepare(whole, own or request.params)
    moved = [each.moved(len(before.token_ids)) for each in request.submitted.items]
    return replace(found, submitted=replace(found.submitted, items=(*before.items, *moved)))


def _without_places(params: SamplingParams) -> SamplingParams:
    """The same parameters without those that name places of the whole prompt."""
    found = copy.copy(params)
    found.prompt_logprob_token_ids = found.prompt_logprob_start = None
    found.routed_experts_prompt_start = 0
    return found


def _check(request: PreparedRequest, has_encoder: bool) -> None:
    params = request.params
    faults = {
        "n > 1": params.n > 1,
        "output_kind FINAL_ONLY": params.output_kind is RequestOutputKind.FINAL_ONLY,
        "stop strings": bool(params.stop),
        "prompt_embeds": request.submitted.embeds is not None,
        "encoder-decoders": has_encoder,
    }
    if fault := next((name for name, is_given in faults.items() if is_given), None):
        raise RequestError(
            f"Input streaming not currently supported with {fault}: pass the whole prompt at once, "
            "or change the request"
        )


class ChunkReader:
    """A task that reads the chunks of a prompt as fast as they come.

    Args:
        chunks: the chunks. An asynchronous generator gets a CancelledError when nobody wants its
            chunks any more.
        on_error: called when `chunks` raises; `next` and `raise_error` raise its exception.

    Attributes:
        is_aborted: whether `abort` was called.
    """

    def __init__(self, chunks: PromptChunks, on_error: Callable[[], None]) -> None:
        self._waiting: deque[Prompt | PromptChunk] = deque()
        self._on_error = on_error
        self._has_news = asyncio.Event()
        self._has_ended = False
        self._error: Exception | None = None
        self.is_aborted = False
        self._task = asyncio.create_task(self._read(chunks))

    @property
    def is_exhausted(self) -> bool:
        """Whether `next` is known to return no further chunk."""
        return self._has_ended and not self._waiting

    async def next(self) -> Prompt | PromptChunk | None:
        """Wait for the next chunk; None if there is none, or after `abort` and `close`."""
        while not self._waiting and not self._has_ended:
            self._has_news.clear()
            await self._has_news.wait()
        self.raise_error()
        return self._waiting.popleft() if self._waiting else None

    def raise_error(self) -> None:
        """Raise the exception that ended `chunks`, if there is one."""
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """Drop the chunks that nobody has taken, and read no more."""
        self.is_aborted = True
        self.close()

    def close(self) -> None:
        """The same, as the end of the reader. Idempotent."""
        self._task.cancel()
        self._waiting.clear()
        self._end()

    def _end(self) -> None:
        self._has_ended = True
        self._has_news.set()

    async def _read(self, chunks: PromptChunks) -> None:
        try:
            async for chunk in chunks:
                self._waiting.append(chunk)
                self._has_news.set()
        except Exception as error:
            self._error = error
            self._on_error()
        finally:
            self._end()
