"""EnginePool whose engines have roles, under random events and interrupts at any line."""

from __future__ import annotations

import itertools
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_members import token_of
from support.fake_pool import Pool
from support.interrupting import Interrupted, Moment, raising_handler
from support.variants import slow

from shmllm.client.flights import TWO_DEATHS
from shmllm.client.protocol import StartedOver
from shmllm.errors import EngineDeadError
from shmllm.outputs.columns import OutputColumns
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams
from shmllm.wire.messages import SHUTTING_DOWN, Method, Rejected

LONG = [*range(5, 65)]
OTHER = [*range(105, 165)]
MODULES = ("shmllm/client/",)
ROLES = ["prefill", "decode"]


class Walk:
    """A pool under random events, with what the front end sees of each request."""

    def __init__(self, roles, data):
        self.pool = Pool(roles=roles, is_revived=True)
        self.data = data
        self.numbers = itertools.count()
        self.tokens = {}
        self.ends = {}
        self.aborted = set()

    def submit(self):
        prompt = self.data.draw(st.sampled_from(PROMPTS))
        max_tokens = self.data.draw(st.sampled_from([1, 3]))
        params = SamplingParams(max_tokens=max_tokens, detokenize=False)
        for k in range(self.data.draw(st.integers(1, 3))):
            number = next(self.numbers)
            self.tokens[number] = []
            request = EngineCoreRequest(number, prompt, params, is_sibling=k > 0)
            self.pool.client.add(request)

    def poll(self):
        events = self.pool.client.poll(0.0)
        for event in events:
            if isinstance(event, StartedOver):
                self.tokens[event.number] = []
            elif isinstance(event, Rejected):
                self.end(event.number, event.message)
            elif isinstance(event, OutputColumns):
                self.take(event)
        del events[:]

    def take(self, columns):
        tokens = iter(columns.token_ids)
        rows = zip(columns.numbers, columns.counts, columns.finishes, strict=True)
        for number, count, finish in rows:
            assert number not in self.ends
            self.tokens[number] += itertools.islice(tokens, count)
            if finish:
                self.end(number, finish)

    def end(self, number, reason):
        assert number not in self.ends, "ended twice"
        self.ends[number] = reason

    def abort(self):
        if self.tokens:
            numbers = self.data.draw(st.sets(st.sampled_from([*self.tokens])))
            self.aborted |= numbers
            self.pool.client.abort([*numbers])

    def engine(self):
        return self.data.draw(st.sampled_from([*self.pool.client._clients]))

    def die(self):
        self.pool.client._next_check_s = 0.0
        if len(self.pool.started) < 4:
            self.engine().is_dead = True

    def leave(self):
        self.pool.client._next_check_s = 0.0
        if len(self.pool.started) < 4:
            self.engine().end_by_itself()

    def refuse(self):
        self.engine().refusal = self.data.draw(st.sampled_from([None, "no"]))

    def hold(self):
        engine = self.engine()
        engine.is_held = not engine.is_held

    def pause(self):
        mode = self.data.draw(st.sampled_from(["wait", "keep"]))
        with suppress(EngineDeadError):  # all engines are dead
            self.pool.client.call(Method.PAUSE, mode)
        self.poll()
        with suppress(EngineDeadError):
            self.pool.client.call(Method.RESUME)

    def finish(self):
        """Let all requests end."""
        pool = self.pool
        for turn in range(60):
            if turn == 20:
                pool.client.call(Method.RESUME)
            pool.client._next_check_s = 0.0
            for each in [*pool.members, *pool.started]:
                each.is_held = False
            self.poll()

    def check(self):
        for number, tokens in self.tokens.items():
            assert tokens == [token_of(number, k) for k in range(len(tokens))]
            assert self.ends[number] in (2, 3, TWO_DEATHS, SHUTTING_DOWN, "no")
            assert self.ends[number] != 3 or number in self.aborted
        self.pool.check_idle()


PROMPTS = [LONG, [*LONG, 3, 4], LONG + LONG, OTHER, [1, 2, 3]]
ACTIONS = [
    "submit", "submit", "submit", "poll", "poll", "abort", "die", "leave", "refuse", "hold", "pause"
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_events_lose_no_request_and_end_none_twice(data):
    walk = Walk(data.draw(st.sampled_from([ROLES, ["prefill", "prefill", "decode", "both"]])), data)
    for action in data.draw(st.lists(st.sampled_from(ACTIONS), max_size=25)):
        getattr(walk, action)()
    walk.finish()
    walk.check()


def interrupt_at(number, victim):
    """Interrupt a caller who submits and polls long prompts. Returns where."""
    pool = Pool(roles=["prefill", "prefill", "decode"])
    pool.submit(3, prompt=LONG)
    if victim is not None:
        pool.members[victim].is_dead = True
        pool.client._next_check_s = 0.0

    def call():
        pool.dispatcher.submit(group, prepared, 0)
        for _ in range(5):
            pool.dispatcher.collect(group, 0.001)

    group, prepared = pool.prepared(OTHER)
    moment = Moment(number, MODULES)
    try:
        with suppress(Interrupted):
            try:
                moment.call(call)
            finally:
                pool.dispatcher.discard_group(group)
        pool.submit(1, prompt=OTHER)  # which may not wait for what never ends
        pool.run()
        for state in pool.states:
            expected = [token_of(state.number, k) for k in range(5)]
            assert (state.error, state.token_ids) == (None, expected)
        for _ in range(3):
            pool.dispatcher.pump(0.001)
        assert not pool.client._flights._flights
        assert not pool.client._flights._phases._under_way
    except BaseException as error:
        raise AssertionError(f"point {number}: {moment.where}") from error
    return moment.where


@pytest.mark.parametrize(("victim", "stride"), [(None, 13), slow(None, 1), slow(0, 1), slow(2, 1)])
def test_interrupts_at_any_line_lose_no_request_between_engines(victim, stride):
    with raising_handler():
        for number in itertools.count(1, stride):
            if interrupt_at(number, victim) is None:
                break
    assert number > 100
