"""What a caller sees of its requests: the RequestOutputs that show their RequestStates.

The functions here change nothing in a state but how much of it a stream has shown.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from shmllm.frontend.request_state import RequestState
from shmllm.frontend.weights.versions import version_spans
from shmllm.outputs.flat_logprobs import FlatLogprobs
from shmllm.outputs.logprob_lists import LogprobsList
from shmllm.outputs.reply import Reply
from shmllm.outputs.request import CompletionOutput, RequestMetrics, RequestOutput
from shmllm.outputs.sampling_masks import SamplingMask
from shmllm.params.sampling import RequestOutputKind
from shmllm.params.token_table import TokenTable


def request_output(state: RequestState) -> RequestOutput:
    """The current output of a request, with all completions of the prompt."""
    completions = [
        _completion(each, each.text_so_far, each.token_ids, _reply_so_far(each))
        for each in _siblings(state)
    ]
    return _make_output(state, completions, _prompt_logprobs(state))


def next_output(state: RequestState) -> RequestOutput | None:
    """The next output of a stream, according to `output_kind` and `stream_interval`.

    Call this after each change of the state, and not after the end of the completion was
    returned.

    Returns:
        An output with this completion alone, or, for FINAL_ONLY, one output with all
        completions of the prompt when all have ended. None if no output is due.
    """
    params = state.request.params
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        return request_output(state) if state.ends_request else None
    num_new = len(state.token_ids) - state.num_emitted
    if state.finish_reason is None and (
        not num_new or (state.num_emitted and num_new < state.stream_interval)
    ):
        return None
    is_delta = params.output_kind is RequestOutputKind.DELTA
    begin = state.num_emitted if is_delta else 0
    delta = state.text.take_delta()
    text = delta if is_delta else state.text.emitted
    reply = _reply_so_far(state)
    if is_delta and state.reply is not None:
        reply = state.reply.take_delta()
    completion = _completion(state, text, state.token_ids[begin:], reply, begin)
    state.num_emitted = len(state.token_ids)
    if is_delta and state.masks is not None:
        state.masks.forget(state.num_emitted)
    return _make_output(state, [completion], None if begin else _prompt_logprobs(state))


def join_completions(outputs: Iterable[RequestOutput | None]) -> list[RequestOutput]:
    """The outputs that a stream yields at once, without those that are None.

    Completions of one prompt that changed together share one output. Separate outputs of two
    completions that ended together would both have `finished` set.
    """
    joined: dict[int, RequestOutput] = {}
    for output in outputs:
        if output is None:
            continue
        first = joined.setdefault(output.prompt_index, output)
        if first is not output:
            first.outputs += output.outputs
            first.prompt_logprobs = first.prompt_logprobs or output.prompt_logprobs
    return list(joined.values())


def _siblings(state: RequestState) -> list[RequestState]:
    """All completions of the prompt, including this one."""
    return state.parent.states or [state]


def _reply_so_far(state: RequestState) -> Reply | None:
    """The reply, without creating it if it does not exist yet and detokenizing is off."""
    if not state.request.params.detokenize or state.reply is None:
        return None
    return state.reply.so_far


def _completion(
    state: RequestState, text: str, token_ids: list[int], reply: Reply | None, begin: int = 0
) -> CompletionOutput:
    """A completion as part of an output, with its tokens from position `begin` on."""
    completion = CompletionOutput(
        index=state.completion_index,
        text=text,
        token_ids=token_ids,
        finish_reason=state.finish_reason,
        stop_reason=state.stop_reason,
        lora_request=state.request.submitted.lora,
    )
    if reply is not None:
        completion.reasoning, completion.content = reply.reasoning, reply.content
        completion.tool_calls = list(reply.tool_calls)
    if state.finish_reason is not None:
        completion.weight_versions = version_spans(state.versions, len(state.token_ids))
        completion.routed_experts = state.routed_experts
    is_delta = state.request.params.output_kind is RequestOutputKind.DELTA
    if state.masks is not None and (is_delta or state.finish_reason is not None):
        kept = state.masks.between(begin, len(state.token_ids))
        completion.sampling_mask = SamplingMask(kept)
    if state.logprobs is not None:
        texts = state.token_texts if state.request.params.detokenize else None
        prompt = state.request.prompt_token_ids
        entries = LogprobsList(state.token_ids, state.logprobs, texts, prompt)
        completion.logprobs = _in_asked_form(state, entries[begin:] if begin else entries)
        completion.cumulative_logprob = state.logprobs.total
    return completion


def _prompt_logprobs(state: RequestState) -> LogprobsList | FlatLogprobs | None:
    first = _siblings(state)[0]
    if first.prompt_logprobs is None or first.request.params.prompt_logprobs is None:
        return None
    texts = first.token_texts if first.request.params.detokenize else None
    prompt = first.request.prompt_token_ids
    entries = LogprobsList(prompt[1:], first.prompt_logprobs, texts, prompt[:1], True)
    return _in_asked_form(state, entries)


def _prompt_token_id_logprobs(state: RequestState) -> npt.NDArray[np.float32] | None:
    first = _siblings(state)[0]
    if first.prompt_logprobs is None or (table := _table_of(first)) is None:
        return None
    scores = np.array(first.prompt_logprobs.top_logprobs, np.float32).reshape(-1, table.width)
    return scores


def _table_of(state: RequestState) -> TokenTable | None:
    table: TokenTable | None = state.request.params.prompt_logprob_token_ids
    return table


def _in_asked_form(state: RequestState, entries: LogprobsList) -> LogprobsList | FlatLogprobs:
    return FlatLogprobs.of(entries) if state.request.params.flat_logprobs else entries


def _make_output(
    state: RequestState,
    completions: list[CompletionOutput],
    prompt_logprobs: LogprobsList | FlatLogprobs | None,
) -> RequestOutput:
    states = _siblings(state)
    return RequestOutput(
        request_id=state.parent.request_id,
        prompt=state.request.prompt,
        prompt_token_ids=state.request.prompt_token_ids,
        outputs=completions,
        finished=not state.parent.num_open,
        num_cached_tokens=states[0].num_cached_tokens,
        prompt_logprobs=prompt_logprobs,
        prompt_token_id_logprobs=_prompt_token_id_logprobs(state),
        metrics=_metrics(state, states),
        error=next((each.error for each in states if each.error is not None), None),
        prompt_index=state.index,
        is_retryable=any(each.is_retryable for each in states),
        encoder_prompt=state.request.encoder_prompt,
        encoder_prompt_token_ids=list(state.request.submitted.encoder_token_ids) or None,
        lora_request=state.request.submitted.lora,
    )


def _metrics(state: RequestState, states: list[RequestState]) -> RequestMetrics:
    """The metrics of the request, whose other counts come with the end of its completions."""
    state.metrics.num_generation_tokens = sum(len(each.token_ids) for each in states)
    if state.finish_reason is None or len(states) == 1:
        return state.metrics
    return state.metrics.with_counts_of([each.metrics for each in states])
