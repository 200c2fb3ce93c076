"""An exception of a signal handler at every line of the front end, and at random moments; the end
of the interpreter at random moments.

SHMLLM_INTERRUPTS sets how many random moments (10,000), SHMLLM_EXITS how many ends of an
interpreter (200), SHMLLM_INTERRUPT_STRIDE that only every so many lines are walked (1),
SHMLLM_TEST_SEED repeats a run.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from conftest import engine_processes
from support.engines import named_engine
from support.interrupted_llm import MODULES, InterruptedLLM
from support.interrupting import Interrupted, Moment, raising_handler
from support.programs import python
from support.waiting import PATIENCE_S, holds_within

from shmllm import LLM
from shmllm.errors import ShmLLMError

pytestmark = [pytest.mark.stress, pytest.mark.usefixtures("no_leaks")]

NUM_INTERRUPTS = int(os.environ.get("SHMLLM_INTERRUPTS", "10000"))
NUM_EXITS = int(os.environ.get("SHMLLM_EXITS", "200"))
STRIDE = int(os.environ.get("SHMLLM_INTERRUPT_STRIDE", "1"))
SEED = int(os.environ.get("SHMLLM_TEST_SEED", str(time.time_ns() % 10**9)))
LATEST_S = 0.012
CALLS = ["generate", "stream", "collective_rpc", "update_weights", "enqueue"]
GENERATING = """
import threading, time
from shmllm import LLM, SamplingParams

llm = LLM(kv_cache_memory_bytes=2**26, num_threads=1)

def generate(num_times):
    for _ in range(num_times):
        llm.generate(["x"] * 4, SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)

threading.Thread(target=generate, args=(10**9,), daemon=True).start()
threading.Thread(target=generate, args=(2,)).start()
time.sleep({after_s})
"""


@pytest.fixture
def calls() -> Iterator[InterruptedLLM]:
    with LLM(kv_cache_memory_bytes=2**26, num_threads=1) as llm:
        yield InterruptedLLM(llm)


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_every_line_leaves_an_llm_that_works(
    calls: InterruptedLLM, name: str
) -> None:
    num_interrupted = 0
    with raising_handler():
        for number in itertools.count(1, STRIDE):
            moment = Moment(number, MODULES)
            faulthandler.dump_traceback_later(2 * PATIENCE_S, exit=True)
            num_interrupted += moment.call(calls.calls[name])
            if moment.where is None:
                break
            try:
                calls.check()
            except BaseException as error:
                raise AssertionError(f"{name}, point {number}, {moment.where}") from error
            finally:
                faulthandler.cancel_dump_traceback_later()
    print(f"{name}: {number - 1} points, {num_interrupted} interrupts")


def test_an_interrupt_at_every_line_of_close_leaves_an_open_or_a_closed_llm(tmp_path: Path) -> None:
    told: Counter[str] = Counter()
    with named_engine(tmp_path) as (name, _), raising_handler():
        for number in itertools.count(1, STRIDE):
            llm = LLM.attach(name)
            moment = Moment(number, MODULES)
            faulthandler.dump_traceback_later(2 * PATIENCE_S, exit=True)
            moment.call(llm.close)
            try:
                llm.generate(["x"], use_tqdm=False)
                told["open"] += 1
            except ShmLLMError as error:
                told[str(error)] += 1
            num_fds = len(os.listdir("/proc/self/fd"))
            llm.close()
            llm.close()
            faulthandler.cancel_dump_traceback_later()
            assert not llm._client._finalizer.alive  # type: ignore[attr-defined]
            if number == 1:
                most = num_fds
            assert num_fds <= most, moment.where
            if moment.where is None:
                break
    print(f"close: {number - 1} points, {told}")
    assert set(told) <= {"open", "this LLM is closed; make a new one"}


def test_interrupts_at_random_moments_leave_an_llm_that_works(calls: InterruptedLLM) -> None:
    print(f"SHMLLM_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    is_armed = False
    ended: Counter[str] = Counter()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if is_armed:
            raise Interrupted

    alarm = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        for number in range(NUM_INTERRUPTS):
            name = rng.choice(CALLS)
            faulthandler.dump_traceback_later(2 * PATIENCE_S, exit=True)
            try:
                is_armed = True
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0001, LATEST_S))
                while True:
                    calls.calls[name]()
            except Interrupted:
                is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            ended[name] += 1
            try:
                calls.check()
            except BaseException as error:
                raise AssertionError(f"{name}, interrupt {number}, seed {SEED}") from error
            faulthandler.cancel_dump_traceback_later()
    finally:
        is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
    print(f"{NUM_INTERRUPTS} interrupts: {ended}")


def test_the_interpreter_ends_at_random_moments() -> None:
    print(f"SHMLLM_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    before = engine_processes()
    for number in range(NUM_EXITS):
        after_s = rng.uniform(0, 0.5)
        done = python("-c", GENERATING.format(after_s=after_s), timeout=2 * PATIENCE_S)
        assert done.returncode == 0, (number, after_s, done.returncode, done.stderr.decode())
        assert holds_within(lambda: engine_processes() == before, PATIENCE_S)
