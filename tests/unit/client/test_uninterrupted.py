"""Calls that no exception of a signal handler ends."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
from support.interrupting import Moment, raising_handler

from shmllm.client.uninterrupted import call_uninterrupted

MODULES = ("shmllm/client/uninterrupted",)


def test_an_exception_of_the_function_is_raised():
    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        call_uninterrupted(fail)


def test_another_thread_calls_the_function_itself():
    seen = []
    thread = threading.Thread(
        target=lambda: call_uninterrupted(lambda: seen.append(threading.current_thread()))
    )
    thread.start()
    thread.join()
    assert seen == [thread]


def test_an_interrupt_at_any_line_comes_after_the_end_and_soon():
    with raising_handler():
        for number in itertools.count(1):
            seen = []

            def work(seen=seen):
                seen.append("begun")
                seen.append("ended")

            moment = Moment(number, MODULES)
            began = time.monotonic()
            is_interrupted = moment.call(lambda work=work: call_uninterrupted(work, 60.0))
            assert time.monotonic() - began < 30, moment.where
            assert seen in ([], ["begun", "ended"]), moment.where
            if moment.where is None:
                break
            assert is_interrupted
    assert number > 5
