"""Dispatcher: one thread polls, other threads can send meanwhile, results reach their groups."""

from __future__ import annotations

import threading
import time

import pytest
from support.fakes import FakeEngineClient

from shmllm.errors import EngineDeadError, ShmLLMError
from shmllm.frontend.dispatcher import Dispatcher
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.output_processor import OutputProcessor
from shmllm.frontend.request_group import RequestGroup
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams

LIMIT_S = 20.0


class SleepingEngine(FakeEngineClient):
    """An engine whose `poll` sleeps until it is woken. It fails if two threads use it at once.

    Attributes:
        goes_on: ends the sleep of `poll`.
        sleeps: set when `poll` sleeps.
        busy: held by the thread that uses the engine.
    """

    def __init__(self):
        super().__init__(1)
        self.goes_on = threading.Event()
        self.sleeps = threading.Event()
        self.busy = threading.Lock()

    def poll(self, timeout_s, *, urgent_only=False):
        with self._alone():
            if not (self.left or self._pending or self.rejected) and timeout_s > 0:
                self.sleeps.set()
                assert self.goes_on.wait(LIMIT_S)
                self.goes_on.clear()
            return super().poll(0)

    def add(self, request, embeds=None):
        with self._alone():
            super().add(request)

    def call(self, method, argument=None):
        with self._alone():
            return super().call(method, argument)

    def wake(self):
        self.goes_on.set()

    stop = wake

    def _alone(self):
        assert not self.busy.locked(), "two threads use the client"
        return self.busy


@pytest.fixture
def engine():
    return SleepingEngine()


@pytest.fixture
def dispatcher(engine, tokenizer_of):
    return Dispatcher(engine, OutputProcessor(tokenizer_of("byte_level")))


def request(max_tokens):
    return PreparedRequest(
        None,
        SamplingParams(max_tokens=max_tokens),
        EngineCoreRequest(-1, [5], SamplingParams(max_tokens=max_tokens)),
    )


def run(dispatcher, group):
    ended = []
    while group.num_open:
        ended += [state for state in dispatcher.collect(group, 1.0) if state.ends_request]
    return ended


def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def seeds_of(tokenizer_of, **facts):
    engine = FakeEngineClient(steps_per_poll=1, **facts)
    dispatcher = Dispatcher(engine, OutputProcessor(tokenizer_of("byte_level")))
    group = RequestGroup()
    for seed in (None, 7, None):
        asked = request(1)
        asked.params.seed = seed
        dispatcher.submit(group, asked, 0)
    return engine.seeds


def test_requests_without_a_seed_get_different_ones_that_follow_from_the_engines(tokenizer_of):
    first, given, second = seeds_of(tokenizer_of, seed=1)
    assert given == 7
    assert -(2**63) <= first < second < 0
    assert seeds_of(tokenizer_of, seed=1) == [first, 7, second]
    assert not {first, second} & set(seeds_of(tokenizer_of, seed=2))


def test_a_sender_does_not_wait_for_the_thread_that_polls(dispatcher, engine):
    results = []

    def wait():
        try:
            dispatcher.collect(RequestGroup(), 2 * LIMIT_S)
        except ShmLLMError as error:
            results.append(error)

    poller = in_thread(wait)
    assert engine.sleeps.wait(LIMIT_S)
    group = RequestGroup()
    dispatcher.submit(group, request(3), 0)
    assert [len(state.token_ids) for state in run(dispatcher, group)] == [3]
    dispatcher.call(1)
    dispatcher.close()
    poller.join(LIMIT_S)
    assert not poller.is_alive()
    assert engine.is_closed
    assert all("closed" in str(error) for error in results)


def test_each_of_many_threads_gets_its_own_results(dispatcher, engine):
    found = []

    def work(number):
        group = RequestGroup()
        for index in range(30):
            dispatcher.submit(group, request(1 + number), index)
            if index % 4 == 0:
                dispatcher.collect(group, 0)
        while group.num_open:
            dispatcher.collect(group, 0.05)
        found.append((number, group._running, group._changed))

    threads = [in_thread(lambda n=n: work(n)) for n in range(6)]
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(number for number, _, _ in found) == list(range(6))
    assert all(not running and not changed for _, running, changed in found)
    assert dispatcher._groups == {}


def test_every_thread_gets_an_error_when_the_engine_dies(dispatcher, engine):
    deaths = []

    def work():
        group = RequestGroup()
        dispatcher.submit(group, request(10**6), 0)
        try:
            run(dispatcher, group)
        except EngineDeadError as death:
            deaths.append(death)

    threads = [in_thread(work) for _ in range(4)]
    while len(engine.added) < 4:
        pass
    engine.error = EngineDeadError("gone")
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(deaths) == 4


def test_discarding_a_group_does_not_affect_other_groups(dispatcher, engine):
    groups = [RequestGroup() for _ in range(3)]
    for group in groups:
        for index in range(2):
            dispatcher.submit(group, request(5), index)
    dispatcher.collect(groups[0], 1.0)
    dispatcher.discard_group(groups[1])
    assert sorted(engine.aborted) == [2, 3]
    assert len(run(dispatcher, groups[0])) == len(run(dispatcher, groups[2])) == 2
    assert dispatcher.outputs._states == {}


def test_discarding_a_request_does_not_affect_the_others_of_its_group(dispatcher, engine):
    group = RequestGroup()
    first = dispatcher.submit(group, request(50), 0)
    dispatcher.submit(group, request(3), 1)
    dispatcher.discard(group, first)
    assert [state.index for state in run(dispatcher, group)] == [1]
    assert engine.aborted == [0]


def test_an_aborted_request_ends_in_its_group(dispatcher, engine):
    group = RequestGroup()
    (state,) = dispatcher.submit(group, request(50), 0)
    dispatcher.collect(group, 1.0)
    dispatcher.abort([state.number])
    assert run(dispatcher, group) == [state]
    assert (state.finish_reason, state.token_ids) == ("abort", [7])


class SlowLock:
    """The dispatcher's lock. A thread that has polled continues late after releasing it."""

    def __init__(self, dispatcher):
        self._dispatcher = dispatcher
        self._lock = dispatcher._lock

    def __getattr__(self, name):
        return getattr(self._lock, name)

    def __enter__(self):
        return self._lock.__enter__()

    def __exit__(self, *details):
        has_polled = self._dispatcher._poller is None
        self._lock.__exit__(*details)
        if has_polled:
            time.sleep(0.002)


class NumberedEvents(FakeEngineClient):
    """An engine whose polls return consecutive numbers."""

    def __init__(self):
        super().__init__(1)
        self.number = 0

    def poll(self, timeout_s, *, urgent_only=False):
        self.number += 1
        return [self.number]


class RecordingOutputs:
    """Records the processed events, in place of an OutputProcessor."""

    def __init__(self):
        self.events = []

    def process(self, events):
        self.events += events
        return [], []


def test_events_are_processed_in_the_order_of_the_polls():
    outputs = RecordingOutputs()
    dispatcher = Dispatcher(NumberedEvents(), outputs)
    dispatcher._lock = SlowLock(dispatcher)

    def collect():
        for _ in range(20):
            dispatcher.collect(RequestGroup(), LIMIT_S)

    threads = [threading.Thread(target=collect) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert outputs.events == list(range(1, 61))
