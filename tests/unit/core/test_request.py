"""Request: its limits, and the conditions that end it."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fakes import FakeConstraint

from shmllm.core.request import Request, RequestStatus, ends_in_repetition
from shmllm.outputs.columns import FinishReason
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import RepetitionDetectionParams, SamplingParams

EOS = (7, 8)


def make_request(num_prompt=3, max_model_len=100, **options):
    return Request(
        0,
        EngineCoreRequest(1, list(range(num_prompt)), SamplingParams(**options)),
        seed=5,
        max_model_len=max_model_len,
        eos_token_ids=EOS,
    )


def finishes(request, token_ids):
    return [request.append(token_id).text for token_id in token_ids]


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "allowed"),
    [(5, 100, 5), (5, 6, 3), (None, 100, 97), (1, 100, 1), (200, 100, 97)],
)
def test_the_output_is_bounded_by_max_tokens_and_by_the_model(max_tokens, max_model_len, allowed):
    request = make_request(max_model_len=max_model_len, max_tokens=max_tokens)
    assert finishes(request, [1] * allowed) == [None] * (allowed - 1) + ["length"]


@pytest.mark.parametrize("token_id", EOS)
def test_every_end_of_sequence_token_stops(token_id):
    assert finishes(make_request(), [1, token_id]) == [None, "stop"]


def test_ignore_eos_ignores_end_of_sequence_tokens():
    assert finishes(make_request(ignore_eos=True), [7, 8]) == [None, None]


def test_ignore_eos_does_not_cover_stop_token_ids():
    request = make_request(ignore_eos=True, stop_token_ids=[8, 20])
    assert finishes(request, [7, 8]) == [None, "stop"]


def test_a_stop_token_has_precedence_over_the_length():
    assert finishes(make_request(max_tokens=2), [1, 7]) == [None, "stop"]


@pytest.mark.parametrize("min_tokens", [0, 1, 2])
def test_the_first_min_tokens_tokens_cannot_stop(min_tokens):
    request = make_request(min_tokens=min_tokens)
    assert finishes(request, [7] * (min_tokens + 1)) == [None] * min_tokens + ["stop"]


def test_min_tokens_does_not_lengthen_the_output():
    assert finishes(make_request(min_tokens=2, max_tokens=2), [7, 7]) == [None, "length"]


INF = float("inf")


def constrained(length, *, bad_words=(), **options):
    submitted = EngineCoreRequest(1, [1], SamplingParams(**options), bad_words=bad_words)
    request = Request(0, submitted, seed=0, max_model_len=100, eos_token_ids=EOS)
    request.constraint = FakeConstraint(length)
    return request


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ignore_eos": True},
        {"min_tokens": 2},
        {"allowed_token_ids": [20, 8]},
        {"logit_bias": {7: -INF, 8: -50}},
        {"bad_words": ((9, 7), (20,))},
    ],
)
def test_a_complete_match_continues_up_to_an_end_token(options):
    request = constrained(2, **options)
    assert finishes(request, [20, 21]) == [None, None]
    request.constraint = FakeConstraint(1)  # llguidance's takes an end token after it stopped
    assert finishes(request, [8]) == ["stop"]


@pytest.mark.parametrize(
    "options",
    [
        {"min_tokens": 3},
        {"allowed_token_ids": [20, 21]},
        {"logit_bias": {7: -INF, 8: -INF}},
        {"bad_words": ((7,), (9, 8))},
    ],
)
def test_a_complete_match_ends_the_output_where_no_end_token_is_possible(options):
    assert finishes(constrained(2, **options), [20, 21]) == [None, "stop"]


def test_a_complete_match_without_room_for_an_end_token_ends_by_its_length():
    assert finishes(constrained(2, max_tokens=2), [20, 21]) == [None, "length"]


def test_prompt_tokens_never_stop():
    request = Request(
        0,
        EngineCoreRequest(0, [7, 7], SamplingParams()),
        seed=0,
        max_model_len=10,
        eos_token_ids=EOS,
    )
    assert request.append(1) is FinishReason.NONE


def test_prompt_and_output_tokens_are_counted_separately():
    request = make_request()
    request.append(40)
    request.append(41)
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (5, 3, 2)
    assert list(request.token_ids) == [0, 1, 2, 40, 41]
    assert request.status is RequestStatus.WAITING


def test_the_prompt_is_copied():
    prompt = [1, 2]
    request = Request(0, EngineCoreRequest(0, prompt, SamplingParams()), seed=0, max_model_len=10)
    request.append(3)
    assert prompt == [1, 2]


def reference_repetition(output, longest, shortest, count):
    """Whether a pattern occurs `count` times in a row at the end, by direct comparison."""
    for size in range(max(shortest, 1), longest + 1):
        pattern = output[len(output) - size :]
        if size * count <= len(output) and output[len(output) - size * count :] == pattern * count:
            return True
    return False


@settings(max_examples=300, deadline=None)
@given(
    output=st.lists(st.integers(1, 3), max_size=24),
    longest=st.integers(1, 6),
    shortest=st.integers(0, 6),
    count=st.integers(2, 5),
)
def test_repetitions_are_those_that_a_direct_search_finds(output, longest, shortest, count):
    shortest = min(shortest, longest)
    detection = RepetitionDetectionParams(longest, shortest, count)
    found = ends_in_repetition(array("i", output), detection)
    assert found == reference_repetition(output, longest, shortest, count)


def test_a_repetition_ends_the_request_and_the_prompt_does_not_count():
    detection = RepetitionDetectionParams(max_pattern_size=2, min_count=3)
    request = make_request(num_prompt=3, max_tokens=50, repetition_detection=detection)
    request.token_ids[:] = array("i", [5, 6, 5])
    assert finishes(request, [6, 5, 6, 5, 6, 5]) == [None] * 5 + ["repetition"]


@pytest.mark.parametrize(
    ("options", "last"),
    [
        ({"min_tokens": 5}, None),
        ({"min_tokens": 4}, "repetition"),
        ({"max_tokens": 4}, "length"),
        ({"stop_token_ids": [2], "min_tokens": 3}, "stop"),
    ],
    ids=str,
)
def test_a_stop_token_and_the_length_have_precedence_over_a_repetition(options, last):
    detection = RepetitionDetectionParams(max_pattern_size=1, min_count=4)
    request = make_request(**{"max_tokens": 50, "repetition_detection": detection} | options)
    assert finishes(request, [2] * 4)[-1] == last
