"""The limit of reasoning, against a definition that looks at all tokens each time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmllm.params.thinking import ThinkingBudget
from shmllm.worker.thinking import ThinkingProgress

tokens = st.lists(st.integers(1, 4), max_size=24)
sequence = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


def last_position(found, sequence):
    positions = range(len(found) - len(sequence), -1, -1)
    return next((i for i in positions if tuple(found[i : i + len(sequence)]) == sequence), -1)


def forced_by_definition(found, budget):
    limit, begin, end, closes = budget
    begin_at = last_position(found, begin)
    if begin_at <= last_position(found, closes) or len(found) - begin_at - len(begin) < limit:
        return None
    written = max(n for n in range(len(end)) if tuple(found[len(found) - n :]) == end[:n])
    return end[written]


@given(tokens, tokens, st.integers(0, 5), sequence, sequence, st.integers(0, 3))
def test_each_position_has_the_token_of_the_definition(prompt, output, limit, begin, end, at):
    budget = ThinkingBudget(limit, begin, end, end[at:] or end)
    progress = ThinkingProgress(budget)
    for length in range(len(output) + 1):
        found = prompt + output[:length]
        forced = progress.forced_token(np.array(found, np.int32))
        assert forced == forced_by_definition(found, budget)


@given(tokens, tokens, st.integers(0, 5), sequence, sequence)
def test_a_resumed_request_is_as_far_as_one_that_was_not_preempted(
    prompt, output, limit, begin, end
):
    budget = ThinkingBudget(limit, begin, end, end)
    progress = ThinkingProgress(budget)
    progress.forced_token(np.array(prompt, np.int32))
    found = np.array(prompt + output, np.int32)
    assert progress.forced_token(found) == ThinkingProgress(budget).forced_token(found)


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_reasoning_has_as_many_tokens_as_its_budget(limit):
    progress = ThinkingProgress(ThinkingBudget(limit, (7,), (8, 9), (9,)))
    found = [5, 7]
    for _ in range(limit + 3):
        forced = progress.forced_token(np.array(found, np.int32))
        found.append(1 if forced is None else forced)
    assert found == [5, 7, *[1] * limit, 8, 9, 1]
