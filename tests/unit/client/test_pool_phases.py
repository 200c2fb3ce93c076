"""EnginePool whose engines have roles: prompts are computed once, and nothing is lost between two
engines."""

from __future__ import annotations

import pytest
from support.fake_members import report
from support.fake_pool import Pool
from support.fakes import info

from shmllm.client.equal_engines import check_equal
from shmllm.client.flights import OTHER_WEIGHTS, TWO_DEATHS
from shmllm.client.phases import FIRST_PREFILL
from shmllm.client.protocol import StartedOver
from shmllm.errors import EngineStartError
from shmllm.outputs.columns import OutputColumns
from shmllm.wire.messages import SHUTTING_DOWN, Method, WeightVersion

LONG = [*range(5, 65)]
OTHER = [*range(105, 165)]
ROLES = ["prefill", "decode"]


def make(roles=ROLES, **options):
    return Pool(roles=roles, **options)


def numbers_at(pool, engine):
    """The requests that an engine has got."""
    return [*pool.members[engine].num_sent]


def test_a_long_prompt_goes_to_both_engines_and_a_short_one_is_decoded():
    pool = make()
    pool.submit(prompt=LONG)
    pool.submit()
    assert numbers_at(pool, 0) == [FIRST_PREFILL]
    assert numbers_at(pool, 1) == [1]
    assert pool.members[0].requests[FIRST_PREFILL].params.max_tokens == 1
    pool.run()
    pool.check_rows()
    assert numbers_at(pool, 1) == [1, 0]


@pytest.mark.parametrize("num_decodes", [1, 3])
def test_equal_prompts_are_computed_once(num_decodes):
    pool = make(["prefill", *["decode"] * num_decodes])
    pool.submit(4, prompt=LONG)
    pool.submit(1, prompt=LONG, n=4)
    assert numbers_at(pool, 0) == [FIRST_PREFILL]
    assert not any(pool.members[1 + k].num_sent for k in range(num_decodes))
    pool.run()
    pool.submit(prompt=LONG)
    pool.run()
    pool.check_rows()
    assert numbers_at(pool, 0) == [FIRST_PREFILL]
    assert all(pool.members[1 + k].num_sent for k in range(num_decodes))


def test_a_prompt_is_computed_again_after_the_caches_were_reset():
    pool = make()
    for member in pool.members:
        member.answers[Method.RESET_PREFIX_CACHE] = True
    pool.submit(prompt=LONG)
    pool.run()
    pool.client.call(Method.RESET_PREFIX_CACHE)
    pool.submit(prompt=LONG)
    pool.run()
    pool.check_rows()
    assert numbers_at(pool, 0) == [FIRST_PREFILL, FIRST_PREFILL + 1]


def test_different_prompts_are_divided_between_the_engines_of_a_role():
    pool = make(["prefill", "prefill", "decode", "decode"])
    for k in range(4):
        pool.submit(prompt=[k, *LONG])
    assert [len(member.requests) for member in pool.members] == [2, 2, 0, 0]
    pool.run()
    pool.check_rows()
    assert [len(member.num_sent) for member in pool.members] == [2, 2, 2, 2]


def test_a_long_prompt_with_one_token_stays_where_it_is_computed():
    pool = make()
    pool.submit(prompt=LONG, max_tokens=1)
    pool.run()
    pool.check_rows(max_tokens=1)
    assert (numbers_at(pool, 0), numbers_at(pool, 1)) == ([0], [])


@pytest.mark.parametrize("num_polls", range(5))
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("is_revived", [False, True])
def test_a_death_in_either_phase_changes_no_row(num_polls, victim, is_revived):
    pool = make(is_revived=is_revived)
    pool.submit(3, prompt=LONG)
    pool.submit(1, prompt=OTHER)
    pool.submit(2)
    for _ in range(num_polls):
        pool.dispatcher.collect(pool.group, 0.001)
    pool.members[victim].is_dead = True
    pool.client._next_check_s = 0.0
    pool.run()
    pool.submit(1, prompt=[3, *OTHER])
    pool.run()
    pool.check_rows()


def test_nobody_is_told_that_a_prefill_starts_over():
    pool = make()
    pool.submit(prompt=LONG)
    pool.members[0].is_dead = True
    pool.client._next_check_s = 0.0
    events = [each for _ in range(3) for each in pool.client.poll(0.001)]
    assert not any(isinstance(event, StartedOver) for event in events)
    pool.run()
    pool.check_rows()


def test_another_engine_computes_what_others_wait_for():
    pool = make(["prefill", "prefill", "decode"])
    pool.submit(3, prompt=LONG)
    pool.members[0].is_dead = True
    pool.run()
    pool.check_rows()
    assert numbers_at(pool, 1) == [FIRST_PREFILL + 1]


def test_a_prefill_engine_that_is_revived_has_its_role_again():
    pool = make(is_revived=True)
    pool.members[0].is_dead = True
    for _ in range(3):
        pool.dispatcher.pump(0.001)
    pool.submit(prompt=LONG)
    assert [*pool.started[0].requests] == [FIRST_PREFILL]
    pool.run()
    pool.check_rows()


@pytest.mark.parametrize("message", [SHUTTING_DOWN, "no"])
def test_a_refused_prefill_is_no_failure(message):
    pool = make()
    pool.members[0].refusal = message
    pool.submit(3, prompt=LONG)
    pool.submit(2, prompt=OTHER)
    pool.run()
    pool.check_rows()
    assert len(numbers_at(pool, 1)) == 5


def test_an_engine_that_leaves_in_a_prefill_counts_as_no_death():
    pool = make()
    pool.members[0].is_held = True
    pool.submit(2, prompt=LONG)
    pool.members[0].end_by_itself()
    pool.dispatcher.collect(pool.group, 0.001)
    assert {flight.num_deaths for flight in pool.client._flights._flights.values()} == {0}
    pool.run()
    pool.check_rows()


def test_a_prompt_that_ends_both_engines_is_not_tried_a_third_time():
    pool = make(["prefill", "decode", "decode"])
    pool.members[0].is_held = True
    pool.submit(prompt=LONG)
    for victim in (0, None):
        if victim is None:
            victim = pool.client._flights._flights[0].placement.engine
        pool.members[victim].is_dead = True
        pool.client._next_check_s = 0.0
        for _ in range(2):
            pool.dispatcher.collect(pool.group, 0.001)
    assert pool.states[0].error == TWO_DEATHS
    pool.check_idle()


def test_the_prefill_engine_alone_serves_everything():
    pool = make()
    pool.members[1].is_dead = True
    pool.submit(2, prompt=LONG)
    pool.submit(2)
    pool.run()
    pool.submit(2, prompt=OTHER)
    pool.run()
    pool.check_rows()
    assert [*pool.members[0].num_sent][-2:] == [4, 5]


def test_an_aborted_prefill_ends_once_and_another_request_takes_its_place():
    pool = make()
    pool.members[0].is_held = True
    pool.submit(3, prompt=LONG)
    pool.dispatcher.abort([0])
    pool.dispatcher.abort([0])
    pool.members[0].is_held = False
    pool.run()
    first = pool.states.pop(0)
    assert (first.finish_reason, first.token_ids) == ("abort", [])
    pool.check_rows()
    assert numbers_at(pool, 0) == [FIRST_PREFILL, FIRST_PREFILL + 1]


def test_requests_that_wait_can_be_aborted():
    pool = make()
    pool.members[0].is_held = True
    pool.submit(3, prompt=LONG)
    pool.dispatcher.abort([1, 2])
    for _ in range(2):
        pool.dispatcher.collect(pool.group, 0.001)
    assert [state.finish_reason for state in pool.states] == [None, "abort", "abort"]
    pool.members[0].is_held = False
    pool.run()
    del pool.states[1:]
    pool.check_rows()


def test_an_abort_that_comes_too_late_for_a_prefill_ends_the_request():
    pool = make()
    pool.submit(prompt=LONG)
    pool.members[0].poll(0.0)  # its row is on its way
    pool.dispatcher.abort([0])
    pool.run()
    assert pool.states[0].finish_reason == "abort"
    assert pool.states[0].token_ids == []
    pool.check_idle()


@pytest.mark.parametrize(
    ("method", "argument"),
    [
        (Method.PAUSE, "wait"),
        (Method.PAUSE, "abort"),
        (Method.SLEEP, {"level": 1, "mode": "abort"}),
        (Method.SLEEP, {"level": 1, "mode": "wait"}),
    ],
)
def test_before_engines_refuse_requests_all_are_where_they_are_decoded(method, argument):
    pool = make()
    for member in pool.members:
        member.answers |= {Method.PAUSE: 0, Method.SLEEP: report(["kv_cache"])}
    pool.members[0].is_held = pool.members[1].is_held = True
    pool.submit(3, prompt=LONG)
    pool.client.call(method, argument)
    assert [*pool.members[1].requests] == [0, 1, 2]
    assert not pool.members[0].requests
    pool.members[0].is_held = pool.members[1].is_held = False
    pool.run()
    pool.check_rows()


def test_a_pause_that_keeps_requests_keeps_their_prefills():
    pool = make()
    pool.members[0].is_held = True
    pool.submit(2, prompt=LONG)
    pool.client.call(Method.PAUSE, "keep")
    assert [*pool.members[0].requests] == [FIRST_PREFILL]
    pool.members[0].is_held = False
    pool.run()
    pool.check_rows()


def test_engines_that_refuse_requests_refuse_long_prompts_too():
    pool = make()
    for member in pool.members:
        member.answers[Method.PAUSE] = 0
        member.refusal = "paused"
    pool.client.call(Method.PAUSE, "wait")
    pool.submit(2, prompt=LONG)
    pool.run()
    assert [state.error for state in pool.states] == ["paused"] * 2
    pool.check_idle()


def test_new_weights_in_a_prefill_are_those_with_which_the_request_begins():
    pool = make(["prefill", "decode", "decode"])
    pool.members[0].is_held = True
    pool.submit(2, prompt=LONG)
    for member in pool.members:
        member.tell(WeightVersion(1))
    pool.dispatcher.collect(pool.group, 0.001)
    pool.members[0].is_dead = True
    pool.client._next_check_s = 0.0
    pool.run()
    pool.check_rows()
    assert OTHER_WEIGHTS not in [state.error for state in pool.states]


def columns(number, queued_ns, num_cached, finish=0):
    return OutputColumns(
        numbers=[number], counts=[1], finishes=[finish], token_ids=[9], cached_rows=[0],
        cached_counts=[num_cached], queued_ns=[queued_ns], scheduled_ns=[queued_ns + 1],
    )  # fmt: skip


def test_the_figures_of_a_request_begin_with_its_prefill():
    pool = make()
    for member in pool.members:
        member.is_held = True
    pool.submit(prompt=LONG)
    pool.members[0].tell(columns(FIRST_PREFILL, 10**9, 16, finish=2))
    pool.dispatcher.collect(pool.group, 0.001)
    pool.members[1].tell(columns(0, 5 * 10**9, 56))
    pool.dispatcher.collect(pool.group, 0.001)
    (state,) = pool.states
    assert state.num_cached_tokens == 16
    assert state.metrics.queued_ts == 1
    assert state.metrics.scheduled_ts == 1 + 1e-9
    assert state.token_ids == [9]


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (["prefill"] * 3, "all 3 engines of the pool have the role 'prefill'.*at least 1 engine"),
        (["decode", "both"], "1 of the 2 engines .* 'decode' and 0 the role 'prefill'"),
    ],
)
def test_roles_that_do_not_complete_each_other_are_refused(roles, words):
    infos = [info(role=role, shared_kv_cache_bytes=9) for role in roles]
    with pytest.raises(EngineStartError, match=words):
        check_equal(infos)


def test_roles_without_a_shared_cache_are_refused():
    infos = [info(role=role, shared_kv_cache_bytes=9) for role in ROLES]
    check_equal(infos)
    with pytest.raises(
        EngineStartError, match="engine 2 of the pool, of the role 'decode', has no"
    ):
        check_equal([infos[0], info(role="decode")])
    assert info().places == "cpu"
    assert info(role="decode", tensor_parallel_size=2).places == "cpu, 2 ranks, decode"
