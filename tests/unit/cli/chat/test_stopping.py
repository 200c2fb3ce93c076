"""Ctrl-C ends an answer once, and nothing else."""

from __future__ import annotations

import signal

import pytest

from shmllm.cli.chat.stopping import AnswerStopped, StopKey


def test_it_stops_what_it_is_armed_for_and_only_once() -> None:
    with StopKey() as stop:
        signal.raise_signal(signal.SIGINT)
        stop.armed = True
        with pytest.raises(AnswerStopped):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_outside_of_its_block_ctrl_c_is_as_before() -> None:
    stop = StopKey()
    stop.armed = True
    with pytest.raises(KeyboardInterrupt) as raised:
        signal.raise_signal(signal.SIGINT)
    assert raised.type is KeyboardInterrupt


def test_what_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopKey() as stop:
            stop.armed = True
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
