"""Scoring: the log-probabilities of given completions, for `score_tokens`.

A completion is scored as the end of a prompt, by `SamplingParams.prompt_logprobs`. So the numbers
are those of the weights in force, whichever weights sampled the completion. This module must not
know how requests are run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shmllm.errors import RequestError
from shmllm.frontend.front_end import FrontEnd
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.prompts import Prompt
from shmllm.frontend.request_state import RequestState
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
        RequestError: a prompt or a completion is wrong; names it.
    """
    if isinstance(completions, str | bytes) or not isinstance(completions, Sequence):
        raise RequestError(
            f"completions must be a list of lists of token ids, got {type(completions).__name__}"
        )
    if len(completions) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts and {len(completions)} completions")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    wholes: list[Any] = [
        {
            "prompt_token_ids": [*request.prompt_token_ids, *_token_ids(index, completion)],
            "cache_salt": request.submitted.cache_salt or None,
        }
        for index, (request, completion) in enumerate(
            zip(front_end.prepare(prompts, params), completions, strict=True)
        )
    ]
    names = [f"prompt {index} with its completion" for index in range(len(wholes))]
    return front_end.prepare(wholes, params, names)


def scores_of(state: RequestState, length: int) -> list[float]:
    """The log-probabilities of the last `length` tokens of the prompt of a request that has ended.

    Raises:
        RequestError: the engine did not serve the request, or a pause or another call ended it.
    """
    state.raise_error()
    store = state.prompt_logprobs
    if store is None or len(store) < len(state.request.prompt_token_ids) - 1:
        raise RequestError("the engine was told to end this request before it was scored")
    return store.logprobs[len(store) - length :].tolist()


def _token_ids(index: int, completion: Any) -> Sequence[int]:
    is_list = isinstance(completion, Sequence) and not isinstance(completion, str | bytes)
    if not is_list or not all(type(token) is int for token in completion):
        raise RequestError(f"completion {index} must be a list of token ids, got {completion!r}")
    ids: Sequence[int] = completion
    return ids
