"""How signals end gpu_check."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from gpu.main import INTERRUPTS, Stopped, stop


@pytest.fixture
def handlers() -> Iterator[None]:
    """Installs gpu_check's handlers, and later the earlier ones."""
    before = {number: signal.signal(number, stop) for number in INTERRUPTS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", INTERRUPTS)
def test_only_the_first_signal_interrupts(number):
    with pytest.raises(Stopped) as stopped:
        os.kill(os.getpid(), number)
    assert stopped.value.number == number
    for each in INTERRUPTS:  # these would end the removal of temporary files
        os.kill(os.getpid(), each)
