"""SuffixDrafter against the definition of suffix decoding."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from shmllm.config.speculative import SpeculativeConfig
from shmllm.core.request import Request, RequestStatus
from shmllm.engine.drafting import suffix
from shmllm.engine.drafting.make import DRAFTERS
from shmllm.engine.drafting.occurrences import END, MOST_FOUND, Occurrences
from shmllm.engine.drafting.suffix import EarlierOutputs, Rules, SuffixDrafter
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams


def config(**changes: Any) -> SpeculativeConfig:
    named = {f"suffix_decoding_{name}": value for name, value in changes.items()}
    return SpeculativeConfig(method="suffix", **named)


def request(prompt: Sequence[int], *output: int, salt: str = "") -> Request:
    submitted = EngineCoreRequest(0, list(prompt), SamplingParams(max_tokens=500), cache_salt=salt)
    made = Request(0, submitted, seed=0, max_model_len=1000)
    made.token_ids.extend(output)
    return made


def end(one: Request) -> None:
    one.status = RequestStatus.FINISHED


def drafts_by_definition(
    text: list[int], known: list[int], config: SpeculativeConfig, most: int
) -> list[tuple[float, list[int]]]:
    """(score, tokens) of the draft for each length of a match."""
    depth, factor = config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_spec_factor
    drafts = []
    for length in range(1, min(depth - 1, len(known)) + 1):
        places = [
            place
            for place in range(len(text) - 1, length - 1, -1)
            if text[place - length : place] == known[-length:]
        ]
        tokens: list[int] = []
        score = 0.0
        while len(tokens) < min(most, int(length * factor), depth - length):
            following = Counter(
                text[place + len(tokens)]
                for place in places
                if place + len(tokens) < len(text) and text[place : place + len(tokens)] == tokens
            )
            token, count = following.most_common(1)[0] if following else (END, 0)
            share = count / max(len(places), 1)
            if token == END or share < config.suffix_decoding_min_token_prob:
                break
            tokens.append(token)
            score += share
        drafts.append((score, tokens))
    return drafts


@pytest.mark.parametrize("seed", range(40))
def test_drafts_have_the_largest_expectation(seed: int) -> None:
    rng = random.Random(seed)
    rules_config = config(
        max_tree_depth=rng.choice([3, 5, 12, 24]),
        max_spec_factor=rng.choice([0.5, 1.0, 2.5]),
        min_token_prob=rng.choice([0.01, 0.1, 0.5, 0.7]),
    )
    rules, letters, most = Rules(rules_config), range(rng.randint(1, 4)), rng.randint(1, 12)
    text = array("i")
    history, num_drafts = Occurrences(text, 8), 0
    while len(text) < MOST_FOUND:
        text.extend(rng.choices([END, *letters] if rng.random() < 0.5 else letters, k=3))
        history.index()
        begin = rng.randrange(len(text))
        known = [*rng.choices(letters, k=3), *text[begin : begin + rng.randint(1, 20)]]
        draft = rules.draft(history, array("i", known[-rules.num_matched :]), most)
        drafts = drafts_by_definition(text.tolist(), known, rules_config, most)
        assert draft.score == pytest.approx(max(score for score, _ in drafts))
        assert (list(draft.token_ids), pytest.approx(draft.score)) in [
            (tokens, score) for score, tokens in drafts
        ] or not draft.token_ids
        num_drafts += bool(draft.token_ids)
    assert num_drafts


@pytest.mark.parametrize("seed", range(10))
def test_a_growing_request_drafts_from_itself(seed: int) -> None:
    rng = random.Random(seed)
    drafter, letters = SuffixDrafter(config()), range(rng.randint(2, 5))
    one = request(rng.choices(letters, k=4), 1)
    while one.num_tokens < MOST_FOUND - 2:
        found = list(drafter.draft(one, 8))
        tokens = one.token_ids.tolist()
        drafts = drafts_by_definition(tokens, tokens, config(), 8)
        best = max(score for score, _ in drafts)
        assert found in [drafted for score, drafted in drafts if score == pytest.approx(best)]
        one.token_ids.extend(rng.choices(letters, k=rng.randint(1, 2)))


def test_the_most_frequent_token_is_drafted_as_long_as_it_is_probable() -> None:
    text = [10, 1, 2, 3, 5, 5, 11, 1, 2, 3, 5, 6, 12, 1, 2, 3, 7, 7, 13, 1, 2, 3]
    drafts = [
        list(SuffixDrafter(config(min_token_prob=least)).draft(request(text), 8))
        for least in (0.1, 0.5, 0.9)
    ]
    assert drafts == [[5, 6, 12], [5], []]


def test_outputs_of_requests_that_ended_are_drafted_from_and_prompts_are_not() -> None:
    drafter = SuffixDrafter(config())
    first = request([90, 91, 92], 1, 2, 3, 4, 5)
    drafter.draft(first, 8)
    assert list(drafter.draft(request([80, 1, 2], 3), 8)) == []
    first.token_ids.append(6)
    end(first)
    assert list(drafter.draft(request([80, 1, 2], 3), 8)) == [4, 5, 6]
    assert list(drafter.draft(request([80, 90], 91), 8)) == []


def test_a_request_with_a_salt_shares_nothing() -> None:
    drafter = SuffixDrafter(config())
    for salt in ("", "a"):
        secret = request([9], 1, 2, 3, 4, salt="a")
        drafter.draft(secret, 8)
        end(secret)
        assert list(drafter.draft(request([8, 1], 2, salt=salt), 8)) == []
    public = request([9], 1, 2, 3, 4)
    drafter.draft(public, 8)
    end(public)
    assert list(drafter.draft(request([8, 1], 2), 8)) == [3, 4]
    assert list(drafter.draft(request([8, 1], 2, salt="a"), 8)) == []
    assert list(drafter.draft(request([7, 1, 2, 3, 1], 2, salt="a"), 8)) == [3, 1]


@pytest.mark.parametrize("most", [0, 1, 2, 5])
def test_the_oldest_outputs_are_forgotten(most: int) -> None:
    drafter = SuffixDrafter(config(max_cached_requests=most))
    for number in range(20):
        one = request([9], *range(100 * number, 100 * number + 5))
        drafter.draft(one, 8)
        end(one)

    def is_known(number: int) -> bool:
        ids = range(100 * number, 100 * number + 2)
        return list(drafter.draft(request([8], *ids), 8)) == [100 * number + 2, 100 * number + 3]

    known = [is_known(number) for number in range(20)]
    assert known[19] == (most > 0)
    assert sum(known) in range((most + 1) // 2, most + 1)
    assert known == sorted(known)


def test_earlier_outputs_have_a_bounded_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MOST_CACHED_TOKENS", 40)
    earlier = EarlierOutputs(1000)
    for number in range(20):
        earlier.add(array("i", [number] * 8))
        assert sum(len(each.text) for each in earlier.generations) <= 40
    assert [each.text[0] for each in earlier.generations] == [18, 16]
    earlier.add(array("i", range(100)))
    assert earlier.generations[0].text.tolist() == [*range(19), END]


def test_a_request_that_still_runs_is_not_earlier() -> None:
    drafter = SuffixDrafter(config())
    running = request([9], 1, 2, 3, 4)
    drafter.draft(running, 8)
    running.status = RequestStatus.WAITING  # preempted
    assert list(drafter.draft(request([8, 1], 2), 8)) == []


def test_the_method_is_known() -> None:
    assert isinstance(DRAFTERS["suffix"](config()), SuffixDrafter)
