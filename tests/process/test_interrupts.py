"""An exception of a signal handler at any line of the front end leaves an LLM that works.

tests/stress/test_interrupts.py has the same walk through every line, and random moments.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import engine_processes
from support.interrupted_llm import MODULES, InterruptedLLM
from support.interrupting import SIGNAL, Interrupted, Moment, raising_handler
from support.programs import python
from support.waiting import PATIENCE_S, holds_within

from shmllm import LLM, SamplingParams
from shmllm.errors import ShmLLMError

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

SEED = 17
NUM_MOMENTS = 12
NUM_EXITS = 3
GENERATING = """
import os, threading, time
from shmllm import LLM, SamplingParams

llm = LLM(kv_cache_memory_bytes=2**26, num_threads=1)
begun = threading.Event()

def generate():
    while True:
        begun.set()
        llm.generate(["x"] * 4, SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)

for _ in range(2):
    threading.Thread(target=generate, daemon=True).start()
begun.wait()
time.sleep({after_s})
"""


@pytest.fixture(scope="module")
def calls() -> Iterator[InterruptedLLM]:
    with LLM(kv_cache_memory_bytes=2**26, num_threads=1) as llm:
        yield InterruptedLLM(llm)


@pytest.mark.parametrize("name", ["generate", "stream", "collective_rpc", "update_weights"])
def test_an_interrupt_at_some_lines_leaves_an_llm_that_works(
    calls: InterruptedLLM, name: str
) -> None:
    rng = random.Random(SEED)
    everything = Moment(-1, MODULES)
    everything.call(calls.calls[name])
    num_points = -1 - everything._left
    with raising_handler():
        for number in rng.sample(range(1, num_points + 1), NUM_MOMENTS):
            moment = Moment(number, MODULES)
            moment.call(calls.calls[name])
            try:
                calls.check()
            except BaseException as error:
                raise AssertionError(f"{name} was interrupted at {moment.where}") from error


def _late_zeros(worker: Any) -> Any:
    """Runs in the engine."""
    import time

    import torch

    time.sleep(0.02)
    return torch.zeros(100)


def test_interrupted_calls_of_the_worker_leave_no_slot_and_no_reply(calls: InterruptedLLM) -> None:
    llm, main = calls.llm, threading.main_thread().ident
    assert main is not None
    num_interrupted = 0
    with raising_handler():
        for _ in range(40):
            timer = threading.Timer(0.005, signal.pthread_kill, (main, SIGNAL))
            try:
                try:
                    timer.start()
                    llm.collective_rpc(_late_zeros)
                finally:
                    timer.join(PATIENCE_S)
            except Interrupted:
                num_interrupted += 1
    assert num_interrupted
    llm.collective_rpc(_late_zeros)
    calls.check()


def generate_for_ever(llm: LLM) -> None:
    while True:
        llm.generate(["x"], SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False)


def test_closing_in_a_signal_handler_ends_the_call_that_it_interrupted() -> None:
    llm = LLM(kv_cache_memory_bytes=2**26, num_threads=1)
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(SIGNAL, lambda number, frame: llm.close())
    timer = threading.Timer(0.2, signal.pthread_kill, (main, SIGNAL))
    try:
        timer.start()
        with pytest.raises(ShmLLMError, match="closed"):
            generate_for_ever(llm)
    finally:
        timer.join(PATIENCE_S)
        signal.signal(SIGNAL, before)
        llm.close()
    with pytest.raises(ShmLLMError, match="closed"):
        llm.generate(["x"], use_tqdm=False)


@pytest.mark.slow
def test_the_interpreter_ends_while_threads_generate() -> None:
    rng = random.Random(SEED)
    before = engine_processes()
    for _ in range(NUM_EXITS):
        after_s = rng.uniform(0, 0.3)
        done = python("-c", GENERATING.format(after_s=after_s))
        assert done.returncode == 0, (after_s, done.returncode, done.stderr.decode())
        assert holds_within(lambda: engine_processes() == before, PATIENCE_S)
