"""What `score_tokens` makes of a request that has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shmllm.errors import EnginePausedError, RequestError
from shmllm.frontend.request_state import RequestState
from shmllm.frontend.scoring import scores_of
from shmllm.outputs.logprob_lists import LogprobStore


def ended(num_scored: int, error: str | None = None, behind: list[float] | None = None) -> Any:
    """A request with a prompt of five tokens, and the scores of a token behind it."""
    store, further = LogprobStore(), LogprobStore()
    store.logprobs.extend([-0.5 * index for index in range(num_scored)])
    further.top_logprobs.extend(behind or [])
    state = SimpleNamespace(
        prompt_logprobs=store,
        logprobs=None if behind is None else further,
        request=SimpleNamespace(prompt_token_ids=[1, 2, 3, 4, 5]),
        error=error,
        is_retryable=error is not None,
    )
    state.raise_error = lambda: RequestState.raise_error(state)  # type: ignore[arg-type]
    return state


@pytest.mark.parametrize(("length", "scores"), [(0, []), (1, [-1.5]), (3, [-0.5, -1.0, -1.5])])
def test_the_scores_of_the_last_tokens(length: int, scores: list[float]) -> None:
    assert scores_of(ended(4), length) == scores


def test_the_score_of_a_token_behind_the_prompt_is_the_last() -> None:
    assert scores_of(ended(4, behind=[-8.0]), 2) == [-1.5, -8.0]


def test_a_request_that_ended_early_has_no_scores() -> None:
    with pytest.raises(RequestError, match="told to end"):
        scores_of(ended(4, behind=[]), 1)
    with pytest.raises(RequestError, match="told to end"):
        scores_of(ended(2), 1)
    with pytest.raises(EnginePausedError, match="asleep"):
        scores_of(ended(0, "asleep"), 1)
