"""Phases: which requests have a prefill, which wait for one, and which engines serve them."""

from __future__ import annotations

import pytest

from shmllm.client.phases import FIRST_PREFILL, LONG_BLOCKS, Phase, Phases, prefill_of
from shmllm.client.routing import chain_hashes
from shmllm.params.pooling import Pooling
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams

SIZE = 4
LONG = list(range(SIZE * (LONG_BLOCKS + 6)))
SHORT = LONG[: SIZE * LONG_BLOCKS]


def make(roles=("prefill", "decode"), num_blocks=100):
    return Phases(roles, num_blocks, SIZE)


def decide(phases, prompt=LONG, running=(0, 1), params=None):
    request = EngineCoreRequest(0, prompt, params or SamplingParams())
    chain = chain_hashes(prompt, SIZE) if request.params.reads_prefix_cache else ()
    return phases.decide(request, chain, running)


def test_a_long_prompt_has_a_prefill_and_a_short_one_has_none():
    assert decide(make()) == (Phase.PREFILL, -1)
    assert decide(make(), SHORT) == (Phase.DECODE, -1)
    assert decide(make(), LONG[: len(SHORT) + 1]) == (Phase.PREFILL, -1)


def test_only_tokens_count_that_no_engine_has_computed():
    phases = make()
    phases.share(chain_hashes(LONG[: len(LONG) - len(SHORT) - 1], SIZE))
    assert decide(phases) == (Phase.PREFILL, -1)
    phases.share(chain_hashes(LONG[: len(LONG) - len(SHORT)], SIZE))
    assert decide(phases) == (Phase.DECODE, -1)
    phases.clear()
    assert decide(phases) == (Phase.PREFILL, -1)


def test_what_a_prefill_under_way_computes_is_waited_for():
    phases = make()
    chain = chain_hashes(LONG, SIZE)
    phases.begun(7, chain)
    assert decide(phases) == (Phase.WAIT, 7)
    assert decide(phases, [*LONG, 1, 2]) == (Phase.WAIT, 7)
    assert decide(phases, LONG + SHORT + [1]) == (Phase.PREFILL, -1)
    assert decide(phases, [9, *LONG]) == (Phase.PREFILL, -1)
    for _ in range(2):
        phases.ended(7, chain)
    assert decide(phases) == (Phase.PREFILL, -1)
    assert not phases._under_way


def test_prefills_of_a_common_prefix_end_one_by_one():
    phases = make()
    first, second = chain_hashes(LONG, SIZE), chain_hashes(LONG + SHORT + [1], SIZE)
    phases.begun(7, first)
    phases.begun(8, second)
    phases.ended(7, first)
    assert decide(phases) == (Phase.PREFILL, -1)
    assert decide(phases, LONG + SHORT + [1]) == (Phase.WAIT, 8)
    phases.ended(8, second)
    assert not phases._under_way


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(prompt_logprobs=1), Phase.DECODE),
        (SamplingParams(skip_reading_prefix_cache=True), Phase.DECODE),
        (SamplingParams(max_tokens=1), Phase.PROMPT),
        (SamplingParams(max_tokens=1, prompt_logprobs=1), Phase.PROMPT),
        (Pooling(), Phase.PROMPT),
    ],
)
def test_requests_that_gain_nothing_have_no_prefill(params, expected):
    assert decide(make(), params=params) == (expected, -1)


def test_a_short_prompt_with_one_token_is_decoded_and_one_to_pool_is_not():
    assert decide(make(), SHORT, params=SamplingParams(max_tokens=1)) == (Phase.DECODE, -1)
    assert decide(make(), SHORT, params=Pooling()) == (Phase.PROMPT, -1)


@pytest.mark.parametrize("running", [[0], [1]])
def test_one_engine_alone_has_no_prefills(running):
    assert decide(make(), running=running) == (Phase.DECODE, -1)
    assert decide(make(), running=running, params=Pooling()) == (Phase.DECODE, -1)


def test_engines_of_each_phase():
    phases = make(["prefill", "decode", "both", "prefill"])
    for phase, expected in (
        (Phase.PREFILL, [0, 3]),
        (Phase.PROMPT, [0, 3]),
        (Phase.DECODE, [1, 2]),
    ):
        assert phases.engines(phase, [0, 1, 2, 3]) == expected
    assert phases.engines(Phase.DECODE, [0, 3]) == [0, 3]
    assert phases.engines(Phase.PROMPT, [1]) == [1]
    assert phases.engines(Phase.PREFILL, [1, 2]) == []


def test_engines_without_roles_do_everything():
    phases = make(["both", "both"])
    assert decide(phases) == decide(phases, params=Pooling()) == (Phase.DECODE, -1)
    assert phases.engines(Phase.DECODE, [0, 1]) == [0, 1]


def test_a_prefill_has_the_prompt_of_its_request_and_nothing_of_its_output():
    params = SamplingParams(logprobs=3, stop_token_ids=[3], max_tokens=50, n=2, seed=3)
    request = EngineCoreRequest(
        5, LONG, params, cache_salt="a", priority=2, bad_words=((1,),), grammar="x", extra_args="{}"
    )
    prefill = prefill_of(request)
    assert prefill.number == 5 + FIRST_PREFILL
    assert (prefill.prompt_token_ids, prefill.cache_salt, prefill.priority) == (LONG, "a", 2)
    assert (prefill.bad_words, prefill.grammar, prefill.extra_args) == ((), "", "")
    own = prefill.params
    assert (own.max_tokens, own.logprobs, own.stop_token_ids) == (1, None, [])
    assert request.params is params
