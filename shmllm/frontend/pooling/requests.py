"""Pooling requests: prepares prompts whose hidden states the engine pools, and runs them.

Any model that generates tokens can pool. The same engine computes vectors and tokens, in the same
steps. `pooled_model` reads the parameters, `plan` makes the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from typing import Any

from shmllm.errors import RequestError
from shmllm.frontend.adapters import Adapters, RequestAdapters
from shmllm.frontend.front_end import FrontEnd
from shmllm.frontend.input_processor import PreparedRequest, match_params
from shmllm.frontend.pooling import long_texts
from shmllm.frontend.pooling.late_chunking import chunk_text
from shmllm.frontend.pooling.late_interaction import KeptQueries
from shmllm.frontend.pooling.named_prompts import named_prompt, num_skipped, with_prompt
from shmllm.frontend.pooling.plan import PoolingPlan
from shmllm.frontend.pooling.pooled_model import PooledModel
from shmllm.frontend.progress import Shown
from shmllm.frontend.prompts import Prompt
from shmllm.frontend.request_state import RequestState
from shmllm.frontend.text.truncation import AS_MANY_AS_FIT, Side, Truncation
from shmllm.outputs.columns import FinishReason
from shmllm.outputs.pooling import PoolingOutput, PoolingRequestOutput
from shmllm.params.late_pooling import LateInteractionParams
from shmllm.params.pooling import Pooling, PoolingParams
from shmllm.params.sampling import SamplingParams

Output = PoolingRequestOutput[PoolingOutput]
Params = PoolingParams | Sequence[PoolingParams] | None

ABORTED = "the engine was stopped, paused or put to sleep and aborted the request"


@dataclass(slots=True, kw_only=True)
class PoolingRequest(PreparedRequest):
    """A checked and tokenized pooling request.

    Attributes:
        plan: what becomes of its result.
        interaction: how it takes part in late interaction; None if it does not.
        num_parts: of the first part of a text that was divided, how many parts there are; 0 for
            the others, 1 for a prompt that is whole.
    """

    plan: PoolingPlan
    interaction: LateInteractionParams | None = None
    num_parts: int = 1

    @property
    def pooling(self) -> Pooling:
        """What the engine does."""
        params = self.submitted.params
        assert isinstance(params, Pooling)
        return params


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How the texts of a call become prompts.

    Attributes:
        truncation: how those that are too long are cut; None refuses them.
        prompt_name: the name of the model's prompt that precedes them; None: none does.
    """

    truncation: Truncation | None = None
    prompt_name: str | None = None

    @classmethod
    def make(
        cls,
        truncate_prompt_tokens: int | None,
        truncation_side: Side = "right",
        prompt_name: str | None = None,
    ) -> TextOptions:
        """The options for the arguments of a call; see `LLM.encode`."""
        kept = truncate_prompt_tokens
        truncation = Truncation(AS_MANY_AS_FIT if kept is None else kept, truncation_side)
        return cls(None if kept is None else truncation, prompt_name)


@dataclass(slots=True)
class _Work:
    """A prompt on its way to a request."""

    name: str
    prompt: Any
    pooling: Pooling
    plan: PoolingPlan
    params: PoolingParams
    num_parts: int = 1


def prepare(
    front_end: FrontEnd,
    model: PooledModel,
    prompts: Sequence[Prompt],
    pooling_params: Params,
    task: str | None = None,
    options: TextOptions | None = None,
    *,
    segments: Sequence[int] = (),
) -> list[PoolingRequest]:
    """Check and tokenize prompts whose hidden states the engine pools.

    Args:
        front_end: of the engine.
        model: what it computes of prompts.
        prompts: one or more prompts.
        pooling_params: one for all or one for each.
        task: the task of all; None takes the parameters', or the model's.
        options: how texts become prompts.
        segments: where the second text of each prompt begins, as `Pooling.second_segment`; empty:
            there are none.

    Returns:
        A request for each prompt, or several one after another for a text that is divided.

    Raises:
        RequestError: a prompt or a parameter is wrong.
    """
    front_end.dispatcher.check_open()
    options = options or TextOptions()
    works = _resolved(model, prompts, pooling_params, task, "pair" if segments else "prompt")
    if options.prompt_name is not None:
        _precede(front_end, model, works, options.prompt_name)
    for work, segment in zip(works, segments, strict=bool(segments)):
        work.pooling = replace(work.pooling, second_segment=segment)
    _divide_chunks(front_end, works, options.truncation)
    truncation = options.truncation
    if model.pooler_config.enable_chunked_processing or model.pooler_config.max_embed_len:
        works, truncation = _limit(front_end, model, works, truncation), None
    return _requests(front_end, works, truncation)


def adapt(
    requests: Sequence[PoolingRequest], lora_request: Adapters, adapters: RequestAdapters
) -> None:
    """Set the adapters of requests.

    Args:
        requests: what `prepare` returned.
        lora_request: one adapter for all prompts, or for each one or None; None: no adapters.
        adapters: those of the engine.

    Raises:
        RequestError: see `RequestAdapters.set`.
    """
    firsts: list[PreparedRequest] = [request for request in requests if request.num_parts]
    adapters.set(firsts, lora_request)
    for request, before in zip(requests[1:], requests, strict=False):
        if not request.num_parts:  # a part of the same text
            request.submitted.lora = before.submitted.lora


def run(
    front_end: FrontEnd, requests: list[PoolingRequest], show_progress: Shown, kept: KeptQueries
) -> list[Output]:
    """Run pooling requests.

    Args:
        front_end: of the engine.
        requests: what `prepare` returned.
        show_progress: whether progress is shown.
        kept: the queries of late interaction.

    Returns:
        The outputs of the prompts, in their order.
    """
    with closing(front_end.run_each([*requests], show_progress)) as ended:
        states = sorted(ended, key=lambda state: state.index)
    return join([pooling_output(state, kept) for state in states], requests)


def join(outputs: Sequence[Output], requests: Sequence[PoolingRequest]) -> list[Output]:
    """Join the outputs of requests that are parts of one prompt. Returns one for each prompt."""
    firsts = [request for request in requests if request.num_parts]
    if len(firsts) == len(outputs):
        return [*outputs]
    counts = [request.num_parts for request in firsts]
    return long_texts.join(outputs, counts, [each.pooling.normalize for each in firsts])


def pooling_output(state: RequestState, kept: KeptQueries) -> Output:
    """The output of a pooling request that has ended.

    Args:
        state: the request's.
        kept: the queries of late interaction, which the request may use or add to.
    """
    request = state.request
    assert isinstance(request, PoolingRequest)
    # An aborted request may have rows of its first tokens.
    has_ended = bool(state.pieces.data) and state.finish_reason != FinishReason.ABORT.text
    is_aborted = state.error is None and not has_ended
    output = PoolingRequestOutput(
        state.parent.request_id,
        PoolingOutput.empty(),
        request.prompt_token_ids,
        state.num_cached_tokens,
        error=ABORTED if is_aborted else state.error,
        prompt=request.prompt,
        is_aborted=is_aborted,
    )
    if output.error is None:
        output.outputs.array = request.plan.finish(
            bytes(state.pieces.data), request.prompt_token_ids
        )
        output.late_chunking = request.plan.chunks
    if request.interaction is not None:
        _interact(output, request.interaction, kept)
    return output


def _interact(output: Output, params: LateInteractionParams, kept: KeptQueries) -> None:
    if output.error is not None:
        kept.release(params)
        return
    try:
        output.outputs.array = kept.result(params, output.outputs.array)
    except RequestError as problem:
        output.outputs, output.error = PoolingOutput.empty(), str(problem)


def _resolved(
    model: PooledModel, prompts: Sequence[Prompt], given: Params, task: str | None, noun: str
) -> list[_Work]:
    matched = match_params(given, len(prompts), PoolingParams(), "pooling_params")
    # Most requests of a batch share their parameters; each are resolved once.
    unique = {id(params): params for params in matched}
    resolved = {key: model.resolve(params, task) for key, params in unique.items()}
    return [
        _Work(_name(noun, index, len(prompts)), prompt, *resolved[id(params)], params)
        for index, (prompt, params) in enumerate(zip(prompts, matched, strict=True))
    ]


def _name(noun: str, index: int, count: int) -> str:
    return f"{noun} {index}" if count > 1 else f"the {noun}"


def _precede(front_end: FrontEnd, model: PooledModel, works: list[_Work], name: str) -> None:
    """Put the model's prompt of this name before the texts."""
    text = named_prompt(model.pooling, name)
    prompts = with_prompt(text, [work.prompt for work in works], [work.name for work in works])
    for work, prompt in zip(works, prompts, strict=True):
        work.prompt = prompt
        kind = work.pooling.type.name
        if work.plan.task == "embed":
            skipped = num_skipped(model.pooling, front_end.tokenizer, text, kind)
            work.pooling = replace(work.pooling, num_skipped=skipped)


def _divide_chunks(front_end: FrontEnd, works: list[_Work], truncation: Truncation | None) -> None:
    """Set the chunks of texts with late chunking."""
    for work in works:
        late = work.params.late_chunking_params
        if late is None:
            continue
        if truncation is not None:
            raise RequestError("Late chunking does not support truncation")
        work.prompt, chunks = chunk_text(
            front_end.tokenizer, work.name, work.prompt, late.chunk_size
        )
        work.plan = replace(work.plan, chunks=chunks)


def _limit(
    front_end: FrontEnd, model: PooledModel, works: list[_Work], truncation: Truncation | None
) -> list[_Work]:
    """Tokenize and cut prompts, and divide or refuse those to embed according to `max_embed_len`
    and `enable_chunked_processing`."""
    config, room = model.pooler_config, front_end.info.max_model_len
    if truncation is not None:
        for work in works:
            long_texts.check_can_be_cut(work.name, work.prompt)
    most = config.max_embed_len or long_texts.NO_LIMIT
    size = room if config.enable_chunked_processing else long_texts.NO_LIMIT
    of_embeddings = most if config.enable_chunked_processing else min(most, room)
    for embeds, limit in ((True, of_embeddings), (False, room)):
        own = [work for work in works if (work.plan.task == "embed") == embeds]
        prompts = [work.prompt for work in own]
        tokenized = long_texts.tokenize(front_end.tokenizer, prompts, truncation, limit)
        for work, prompt in zip(own, tokenized, strict=True):
            work.prompt = prompt
    parts: list[_Work] = []
    for work in works:
        divided = [work.prompt]
        if work.plan.task == "embed":
            divided = long_texts.divide(work.name, work.prompt, size, most)
        parts.append(replace(work, prompt=divided[0], num_parts=len(divided)))
        rest = replace(work.pooling, num_skipped=0)  # only the first part has the model's prompt
        parts += [replace(work, prompt=part, pooling=rest, num_parts=0) for part in divided[1:]]
    return parts


def _requests(
    front_end: FrontEnd, works: list[_Work], truncation: Truncation | None
) -> list[PoolingRequest]:
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    prepared = front_end.inputs.prepare(
        [work.prompt for work in works],
        [params] * len(works),
        [work.name for work in works],
        min_room=0,
        truncation=truncation,
    )
    requests = []
    for work, each in zip(works, prepared, strict=True):
        each.submitted.params = work.pooling
        values = {own.name: getattr(each, own.name) for own in fields(PreparedRequest)}
        requests.append(
            PoolingRequest(
                **values,
                plan=work.plan,
                interaction=work.params.late_interaction_params,
                num_parts=work.num_parts,
            )
        )
    return requests
