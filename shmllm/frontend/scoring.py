"""Scoring: the log-probabilities of given completions, for `score_tokens`.

A completion is scored as the end of a prompt, by `SamplingParams.prompt_logprobs`. So the numbers
are those of the weights in force, whichever weights sampled the completion. A prompt leaves room
for a token behind it: the last token of a whole context is scored in that place, by
`SamplingParams.logprob_token_ids`. This module must not know how requests are run.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from shmllm.errors import RequestError
from shmllm.frontend.front_end import FrontEnd
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.prompts import Prompt
from shmllm.frontend.request_state import RequestState
from shmllm.frontend.token_checks import check_token_ids
from shmllm.params.sampling import SamplingParams

Completions = Sequence[Sequence[int]]


def prepare(
    front_end: FrontEnd, prompts: Sequence[Prompt], completions: Completions
) -> list[PreparedRequest]:
    """Check and tokenize prompts, and append a completion to each.

    Args:
        front_end: of the engine.
        prompts: one or more prompts.
        completions: the token ids of one completion for each prompt.

    Raises:
        RequestError: a prompt or a completion is wrong; names it. Or the model's prompts attend to
            all of themselves.
    """
    if isinstance(completions, str | bytes) or not isinstance(completions, Sequence):
        raise RequestError(
            f"completions must be a list of lists of token ids, got {type(completions).__name__}"
        )
    if len(completions) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts and {len(completions)} completions")
    info = front_end.info
    if info.pooling.spans_prompts:
        raise RequestError(
            "score_tokens is not possible for this model: a completion is scored as the end of a "
            "prompt, and prompts attend to all of themselves"
        )
    found: list[PreparedRequest] = []
    for index, (request, completion) in enumerate(
        zip(front_end.prepare(prompts, _params()), completions, strict=True)
    ):
        ids = [*request.prompt_token_ids, *_token_ids(index, completion, info.vocab_size)]
        behind = ids[-1:] if len(ids) == info.max_model_len else []
        scored = ids[: len(ids) - len(behind)]
        check_token_ids(f"prompt {index} with its completion", scored, info, 1)
        found.append(request.continued(scored, _params(behind)))
    return found


def _params(behind: list[int] | None = None) -> SamplingParams:
    """The parameters that score a prompt, and the token behind it if there is one."""
    return SamplingParams(
        temperature=0,
        max_tokens=1,
        prompt_logprobs=0,
        logprob_token_ids=behind or None,
        detokenize=False,
    )


def scores_of(state: RequestState, length: int) -> list[float]:
    """The log-probabilities of the last `length` tokens that a request has scored, and that ended.

    Raises:
        RequestError: the engine did not serve the request, or a pause or another call ended it.
    """
    state.raise_error()
    prompt, behind = state.prompt_logprobs, state.logprobs
    scores = array("f") if prompt is None else prompt.logprobs
    count = len(state.request.prompt_token_ids) - 1
    if behind is not None:
        scores, count = scores + behind.top_logprobs, count + 1
    if len(scores) < count:
        raise RequestError("the engine was told to end this request before it was scored")
    return scores[len(scores) - length :].tolist()


def _token_ids(index: int, completion: Any, vocab_size: int) -> Sequence[int]:
    is_list = isinstance(completion, Sequence) and not isinstance(completion, str | bytes)
    if not is_list or not all(type(token) is int for token in completion):
        raise RequestError(f"completion {index} must be a list of token ids, got {completion!r}")
    ids: Sequence[int] = completion
    unknown = next((token for token in ids if not 0 <= token < vocab_size), None)
    if unknown is not None:
        raise RequestError(
            f"completion {index} has token id {unknown}; the vocabulary has ids from 0 to "
            f"{vocab_size - 1}",
            parameter="completions",
            value=unknown,
        )
    return ids
