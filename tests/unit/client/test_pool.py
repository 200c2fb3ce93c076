"""EnginePool over engines without processes: deaths, order of events, interrupts at any line."""

from __future__ import annotations

import gc
import itertools
import weakref
from contextlib import suppress
from functools import partial

import pytest
from support.fake_members import FakeMember, FakeWaiter, report, token_of
from support.fake_pool import Pool
from support.fakes import info
from support.interrupting import Interrupted, Moment, raising_handler
from support.variants import slow

from shmllm.client import revival as revival_module
from shmllm.client.equal_engines import check_equal
from shmllm.client.flights import OTHER_WEIGHTS, TWO_DEATHS
from shmllm.client.pool import EnginePool
from shmllm.client.protocol import StartedOver, StartProgress
from shmllm.client.revival import Revival
from shmllm.errors import EngineDeadError, EngineStartError
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.request_group import RequestGroup
from shmllm.outputs.columns import OutputColumns
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.wire.messages import SHUTTING_DOWN, Method, WeightVersion

MODULES = ("shmllm/client/",)


def test_requests_are_divided_and_complete():
    pool = Pool()
    pool.submit(6)
    assert [len(member.requests) for member in pool.members] == [3, 3]
    pool.run()
    pool.check_rows()


@pytest.mark.parametrize("num_polls", range(6))
@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_at_any_step_changes_no_row(num_polls, victim):
    pool = Pool()
    pool.submit(6)
    for _ in range(num_polls):
        pool.dispatcher.collect(pool.group, 0.001)
    pool.members[victim].is_dead = True
    pool.run()
    pool.check_rows()


def test_an_engine_that_ends_by_itself_changes_no_row():
    pool = Pool()
    pool.submit(6)
    pool.dispatcher.collect(pool.group, 0.001)
    aborted_by_user = pool.states.pop(0)
    pool.dispatcher.abort([aborted_by_user.number])
    pool.members[0].end_by_itself()
    pool.run()
    assert aborted_by_user.finish_reason == "abort"
    pool.check_rows()


def test_a_draining_engine_gets_no_requests():
    pool = Pool()
    pool.members[0].refusal = SHUTTING_DOWN
    pool.submit(4)
    pool.run()
    pool.submit(4)
    assert len(pool.members[1].requests) == 4
    pool.run()
    pool.check_rows()


def test_a_refusal_of_all_engines_is_one():
    pool = Pool()
    for member in pool.members:
        member.refusal = SHUTTING_DOWN
    pool.submit(2)
    pool.run()
    assert {state.error for state in pool.states} == {SHUTTING_DOWN}


def test_aborts_of_requests_at_a_dead_engine_end_them():
    pool = Pool()
    pool.submit(4)
    for member in pool.members:
        member.is_dead = True
        pool.dispatcher.collect(pool.group, 0) if member is pool.members[0] else None
    pool.members[1].is_dead = False
    pool.dispatcher.abort([state.number for state in pool.states])
    pool.run()
    assert {state.finish_reason for state in pool.states} == {"abort"}
    assert not pool.client._flights._flights


def test_the_death_of_all_engines_is_raised():
    pool = Pool()
    pool.submit(4)
    for member in pool.members:
        member.is_dead = True
    with pytest.raises(EngineDeadError, match="it died"):
        pool.run()
    with pytest.raises(EngineDeadError):
        pool.client.call(Method.LIST_LORAS)
    with pytest.raises(EngineDeadError):
        pool.submit()
    assert pool.client.stats()["running"] >= 0  # the page of a dead engine can be read


def test_requests_wait_for_an_engine_that_starts():
    pool = Pool(is_revived=True)
    pool.submit(4)
    pool.dispatcher.collect(pool.group, 0)
    for member in pool.members:
        member.is_dead = True
    pool.run()
    assert len(pool.started) == 2
    pool.check_rows()


def test_the_last_engine_that_starts_takes_the_requests(monkeypatch):
    """Also if the other one is not started any more, no engine runs until it is there."""
    monkeypatch.setattr(revival_module, "MOST_STARTS", 1)
    pool = Pool(is_revived=True)
    pool.members[0].is_dead = True
    pool.dispatcher.pump(0.001)
    pool.dispatcher.pump(0.001)
    pool.started[0].is_dead = True
    pool.dispatcher.pump(0.001)
    assert pool.client._flights.alive == [1]
    pool.members[1].is_dead = True
    pool.submit(2)
    pool.run()
    pool.check_rows()


def test_an_engine_that_dies_while_it_starts_is_started_again():
    pool = Pool(is_revived=True, starts_ready=False)
    pool.members[0].is_dead = True
    pool.submit(4)
    while not pool.started:
        pool.dispatcher.pump(0.001)
    pool.started[0].is_dead = True
    while len(pool.started) < 2:
        pool.dispatcher.pump(0.001)
    assert pool.client._flights.alive == [1]
    pool.started[1].is_ready = True
    pool.dispatcher.pump(0.001)
    assert pool.client._flights.alive == [1, 0]
    pool.run()
    pool.check_rows()


def test_an_engine_is_started_three_times(caplog):
    pool = Pool(is_revived=True)
    members = [pool.members[0], *itertools.repeat(None, 3)]
    for turn in range(4):
        victim = members[turn] or pool.started[-1]
        victim.is_dead = True
        for _ in range(3):
            pool.dispatcher.pump(0.001)
    assert len(pool.started) == 3
    assert "it is not started again: it has ended 4 times" in caplog.text
    pool.submit(4)
    pool.run()
    pool.check_rows()


def test_a_trace_may_begin_before_engines_are_ready_and_has_new_ones_too():
    members = [FakeMember(FakeWaiter()) for _ in range(2)]
    EnginePool(members).trace("recorder")
    assert [member.recorder for member in members] == ["recorder"] * 2
    pool = Pool(is_revived=True)
    pool.client.trace("recorder")
    pool.members[1].is_dead = True
    for _ in range(3):
        pool.dispatcher.pump(0.001)
    assert pool.started[0].recorder == "recorder"


def test_a_pool_that_nobody_refers_to_is_gone_at_once():
    """The finalizers of its clients end the engines."""
    pool = EnginePool([FakeMember(FakeWaiter()) for _ in range(2)], Revival(FakeMember))
    pool.wait_ready()
    reference = weakref.ref(pool)
    gc.disable()
    try:
        del pool
        assert reference() is None
    finally:
        gc.enable()


def test_a_replaced_client_is_closed_unless_it_has_the_doorbell():
    pool = Pool(is_revived=True)
    for member in pool.members:
        member.is_dead = True
        for _ in range(3):
            pool.dispatcher.pump(0.001)
    assert [member.is_closed for member in pool.members] == [False, True]
    pool.client.close()
    assert all(member.is_closed for member in pool.members + pool.started)


@pytest.mark.parametrize(("num_rows", "failed"), [(3, []), (4, [0]), (5, [0, 6])])
def test_requests_that_ran_at_two_deaths_fail_and_others_do_not(num_rows, failed):
    """Engine 0 has requests 0, 3 and 6, of which 0 and 6 come fourth and fifth at engine 1."""
    pool = Pool(3, max_num_seqs=num_rows)
    pool.submit(9, max_tokens=20)
    for victim in (0, 1):
        pool.members[victim].is_dead = True
        pool.client._next_check_s = 0.0
        for _ in range(3):
            pool.dispatcher.collect(pool.group, 0.001)
    pool.run()
    errors = {state.number: state.error for state in pool.states if state.error is not None}
    assert errors == dict.fromkeys(failed, TWO_DEATHS)


def test_a_death_before_a_request_is_none_of_its_deaths():
    pool = Pool(3)
    pool.members[0].is_dead = True
    pool.client._next_check_s = 0.0
    pool.submit(1)
    pool.dispatcher.collect(pool.group, 0.001)
    pool.members[1].is_dead = True
    pool.run()
    pool.check_rows()


def test_requests_start_over_only_with_equal_weights():
    pool = Pool()
    pool.submit(4, max_tokens=20)
    pool.dispatcher.collect(pool.group, 0.001)
    for member in pool.members:
        member.tell(WeightVersion(1))
    pool.dispatcher.collect(pool.group, 0.001)
    pool.members[0].is_dead = True
    pool.run()
    assert [state.error for state in pool.states].count(OTHER_WEIGHTS) == 2
    pool.submit(1)
    pool.run()
    assert pool.states[-1].error is None


def tokens_of(number, events):
    """The tokens of a request in events."""
    found = []
    for event in events:
        if isinstance(event, OutputColumns) and number in event.numbers:
            found.append(event.token_ids[event.numbers.index(number)])
    return found


def test_one_event_tells_of_new_weights_and_starts_come_before_tokens():
    pool = Pool()
    for member in pool.members:
        member.tell(WeightVersion(3))
    events = pool.client.poll(0.0)
    assert events == [WeightVersion(3)]
    events.clear()
    pool.submit(2)
    pool.client.poll(0.0).clear()
    pool.members[0].is_dead = True
    events = []
    pool.client._next_check_s = 0.0
    for _ in range(20):
        fresh = pool.client.poll(0.001)
        events += fresh
        del fresh[:]
    (place,) = [k for k, event in enumerate(events) if isinstance(event, StartedOver)]
    number = events[place].number
    tokens = [token_of(number, position) for position in range(5)]
    assert tokens_of(number, events[:place]) == []  # those of the dead engine came before
    assert tokens_of(number, events[place:]) == tokens


def test_a_full_ring_of_a_dead_engine_ends_no_submit():
    pool = Pool()

    def full(request):
        raise EngineDeadError("it died")

    pool.members[0].add = full
    pool.members[0].is_dead = True
    pool.submit(4)
    pool.run()
    pool.check_rows()


def test_a_rejection_ends_a_request_once():
    pool = Pool()
    pool.members[0].refusal = "no"
    pool.submit(2)
    pool.run()
    assert [state.error for state in pool.states].count("no") == 1
    assert not pool.client._flights._flights


def test_engines_that_differ_are_refused_by_name():
    check_equal([info(), info(num_blocks=99, max_num_seqs=2)])
    with pytest.raises(EngineStartError, match="dtype of the first one is 'float32', and of numb"):
        check_equal([info(), info(), info(dtype="bfloat16")])


def interrupt_at(number, is_revived, num_deaths):
    """Interrupt a caller while engines have just died. Returns where."""
    pool = Pool(is_revived=is_revived)
    pool.submit(4, max_tokens=6)
    pool.dispatcher.collect(pool.group, 0)
    for victim in pool.members[:num_deaths]:
        victim.is_dead = True
    group = RequestGroup()
    params = SamplingParams(max_tokens=6, detokenize=False)
    request = PreparedRequest(None, params, EngineCoreRequest(-1, [5], params))

    def call():
        try:
            pool.dispatcher.submit(group, request, 0)
            for _ in range(8):
                pool.dispatcher.collect(group, 0.001)
        finally:
            pool.dispatcher.discard_group(group)

    moment = Moment(number, MODULES)
    with suppress(Interrupted):
        moment.call(call)
    try:
        pool.run()
        for state in pool.states:
            expected = [token_of(state.number, k) for k in range(6)]
            assert (state.error, state.token_ids) == (None, expected)
        assert not pool.dispatcher._groups
        assert not pool.dispatcher._lock.locked()
    except BaseException as error:
        raise AssertionError(f"point {number}: {moment.where}") from error
    return moment.where


@pytest.mark.parametrize(("is_revived", "num_deaths"), [slow(False, 1), (True, 1), slow(True, 2)])
def test_interrupts_at_any_line_lose_no_request(is_revived, num_deaths):
    with raising_handler():
        for number in itertools.count(1):
            if interrupt_at(number, is_revived, num_deaths) is None:
                break
    assert number > 100


def test_an_engine_with_other_weights_is_not_started_again(caplog):
    """Whatever has changed them, such as a function that was sent."""
    pool = Pool(is_revived=True)
    for member in pool.members:
        member.tell(WeightVersion(1))
    pool.dispatcher.pump(0.001)
    pool.members[0].is_dead = True
    for _ in range(3):
        pool.dispatcher.pump(0.001)
    assert not pool.started
    assert "it is not started again: weights were sent since the start" in caplog.text


def test_the_front_end_waits_beside_the_threads_of_all_engines():
    pool = Pool(3, num_threads=2)
    assert pool.members[0].num_waited_threads == 6


def test_engines_start_at_the_same_time_and_their_progress_is_one():
    members = [FakeMember(FakeWaiter()) for _ in range(2)]
    polls, seen = [], []

    def poll_ready(member, progress):
        polls.append(member)
        progress.on_load(len(polls), 10)
        return member.info if len(polls) > 4 else None

    for member in members:
        member.poll_ready = partial(poll_ready, member)
    pool = EnginePool(members)
    pool.wait_ready(StartProgress(lambda *numbers: seen.append(numbers)))
    assert polls == members * 3
    assert seen == [(1, 20), (3, 20), (5, 20), (7, 20), (9, 20), (11, 20)]


def test_a_request_without_a_bound_ends_where_the_engine_with_the_least_room_would_end_it():
    pool = Pool()
    pool.members[1].info = info(vocab_size=600, max_model_len=50)
    pool.client.wait_ready()
    pool.submit(2, max_tokens=None)
    sent = [each for member in pool.members for each in member.requests.values()]
    assert [each.params.max_tokens for each in sent] == [47, 47]
    assert all(state.request.params.max_tokens is None for state in pool.states)


def test_routing_forgets_prefixes_that_engines_have_forgotten():
    pool = Pool(block_size=2)
    sent = pool.client._flights._router._sent

    def num_known():
        return sum(map(len, sent))

    def submit():
        pool.submit(1, max_tokens=1)
        pool.run()
        assert num_known()

    for member in pool.members:
        member.answers |= {Method.RESET_PREFIX_CACHE: False, Method.SLEEP: report([])}
    submit()
    assert not pool.client.call(Method.RESET_PREFIX_CACHE)
    assert num_known()
    pool.client.call(Method.SLEEP, {"level": 0, "mode": "keep"})
    assert num_known()
    pool.client.call(Method.SLEEP, {"level": 1, "mode": "keep"})
    assert not num_known()
    submit()
    pool.members[0].tell(WeightVersion(1))
    pool.dispatcher.pump(0.001)
    assert not num_known()
