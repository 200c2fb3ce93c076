"""Signal handlers that run behind a call."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator

import pytest
from support.interrupting import SIGNAL, Interrupted, Moment, raising_handler

from shmllm.client.held_signals import call_with_signals_held

MODULES = ("shmllm/client/held_signals",)


@pytest.fixture(autouse=True)
def _own_handler_of_ctrl_c() -> Iterator[None]:
    """Of two interrupts the second may come while handlers get their places back. One that has not
    got it back is called all the same, but tests behind these look for it."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("is_twice", [False, True])
def test_an_interrupt_at_any_line_is_raised_and_the_handlers_are_back(is_twice):
    for number in itertools.count(1):
        seen = []

        def work(seen=seen):
            seen.append("begun")
            seen.append("ended")

        with raising_handler(is_twice):
            before = [signal.getsignal(each) for each in (SIGNAL, signal.SIGINT)]
            moment = Moment(number, MODULES)
            is_interrupted = False
            try:
                is_interrupted = moment.call(lambda work=work: call_with_signals_held(work))
                for _ in range(2):  # the second signal may have arrived at the last point
                    pass
            except Interrupted:
                is_interrupted = True
            assert seen in ([], ["begun", "ended"]), moment.where
            if not is_twice:
                after = [signal.getsignal(each) for each in (SIGNAL, signal.SIGINT)]
                assert after == before, moment.where
            if moment.where is None:
                break
            assert is_interrupted
            with pytest.raises(Interrupted):  # its own handler gets the next one in any case
                signal.raise_signal(SIGNAL)
    assert number > 100


def test_all_handlers_run_behind_the_call():
    seen = []

    def work():
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1):
            signal.raise_signal(number)
        seen.append("ended")

    def handle(number, frame):
        seen.append(number)
        raise Interrupted

    before = {each: signal.signal(each, handle) for each in (signal.SIGUSR1, signal.SIGUSR2)}
    try:
        with pytest.raises(Interrupted):
            call_with_signals_held(work)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert seen[0] == "ended"
    assert sorted(seen[1:]) == [signal.SIGUSR1, signal.SIGUSR2]


def test_a_second_ctrl_c_ends_a_call_that_hangs():
    def work():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it was not ended")

    with pytest.raises(KeyboardInterrupt):
        call_with_signals_held(work)


def test_the_functions_own_exception_is_raised():
    with pytest.raises(ZeroDivisionError):
        call_with_signals_held(lambda: 1 // 0)
