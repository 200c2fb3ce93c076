"""NgramDrafter against its definition."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from shmllm.core.request import Request
from shmllm.engine.drafting.ngram import NgramDrafter
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams


def request(*token_ids: int) -> Request:
    submitted = EngineCoreRequest(0, list(token_ids), SamplingParams(max_tokens=500))
    return Request(0, submitted, seed=0, max_model_len=1000)


def by_definition(tokens: Sequence[int], shortest: int, longest: int, most: int) -> list[int]:
    """What follows the last place of the longest stretch at the end that occurred before, where the
    draft itself follows the tokens."""
    for size in range(longest, shortest - 1, -1):
        for end in reversed(range(size, len(tokens))):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                draft: list[int] = []
                while len(draft) < most:
                    draft.append([*tokens, *draft][end + len(draft)])
                return draft
    return []


def test_the_longest_stretch_counts_and_its_last_place() -> None:
    drafter = NgramDrafter(1, 3)
    found = drafter.draft(request(1, 2, 3, 7, 8, 1, 2, 3, 9, 0, 3, 5, 1, 2, 3), 3)
    assert list(found) == [9, 0, 3]


def test_a_stretch_may_overlap_what_it_repeats() -> None:
    assert list(NgramDrafter(2, 5).draft(request(4, 4, 4), 3)) == [4, 4, 4]


@pytest.mark.parametrize("tokens", [(1,), (1, 2), (1, 2, 3), (1, 2, 1)])
def test_nothing_is_drafted_where_nothing_was_repeated(tokens: tuple[int, ...]) -> None:
    assert list(NgramDrafter(2, 5).draft(request(*tokens), 8)) == []


@pytest.mark.parametrize("seed", range(30))
def test_a_growing_text_has_the_drafts_of_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    shortest = rng.randint(1, 3)
    longest = rng.randint(shortest, 6)
    letters, most = range(rng.randint(1, 4)), rng.randint(1, 9)
    drafter, one = NgramDrafter(shortest, longest), request(*rng.choices(letters, k=5))
    num_drafts = 0
    for _ in range(60):
        expected = by_definition(one.token_ids.tolist(), shortest, longest, most)
        assert list(drafter.draft(one, most)) == expected
        num_drafts += bool(expected)
        one.token_ids.extend(rng.choices(letters, k=rng.randint(1, 3)))
    assert num_drafts > 10
