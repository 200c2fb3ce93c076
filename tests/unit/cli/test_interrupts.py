"""`uninterrupted` delays signals and loses none."""

from __future__ import annotations

import contextlib
import signal

import pytest

from shmllm.cli.interrupts import Interrupted, interruptible, uninterrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_takes_effect_after_the_protected_block(number: signal.Signals) -> None:
    done: list[str] = []

    def command() -> None:
        with interruptible():
            with uninterrupted():
                signal.raise_signal(number)
                done.append("all of it")
            done.append("what follows")

    with pytest.raises(Interrupted) as raised:
        command()
    assert done == ["all of it"]
    assert raised.value.exit_code == 128 + number


def test_a_clean_up_registered_in_the_block_runs_after_the_signal() -> None:
    ended: list[str] = []

    def start() -> None:
        with contextlib.ExitStack() as undo, uninterrupted():
            signal.raise_signal(signal.SIGINT)
            undo.callback(ended.append, "ended")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert ended == ["ended"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
