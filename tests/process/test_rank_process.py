"""Processes of ranks that cannot be started, do not end, or are interrupted leave nothing."""

from __future__ import annotations

import gc
import os
import signal
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.programs import children, open_files
from support.waiting import wait_until

from shmllm.config import processes
from shmllm.config.engine import EngineConfig
from shmllm.config.load import LoadConfig
from shmllm.config.parallel import ParallelConfig
from shmllm.errors import RankDeadError
from shmllm.parallel import ranks
from shmllm.parallel.memory import GroupMemory
from shmllm.parallel.rank_process import RankProcess
from shmllm.parallel.ranks import RankProcesses
from shmllm.parallel.staging import StagingWriter

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

CONFIG = EngineConfig(
    LoadConfig("nowhere"),
    parallel=ParallelConfig(tensor_parallel_size=4),
    num_threads=4,
    device="cpu",
)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """The test must leave no descriptor, no thread and no child."""
    before = own_state()
    yield
    assert not own_state() - before  # what an earlier test left may end meanwhile


def own_state() -> Counter[Any]:
    """The kinds of this process's open files, its threads, and the PIDs of its children."""
    gc.collect()  # mappings have descriptors of their own
    kinds = [name.partition(":")[0] for name in open_files(os.getpid())]
    return Counter([*kinds, *threading.enumerate(), *children(os.getpid())])


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that lets ranks run a source text, whose `arguments` are those of a rank."""
    usual = sys.executable

    def use(source: str) -> None:
        path = tmp_path / "rank"
        head = "import os, sys, time\narguments = list(map(int, sys.argv[3:]))\n"
        path.write_text(f"#!{usual}\n{head}{textwrap.dedent(source)}")
        path.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(path))

    return use


def test_a_rank_that_cannot_be_started_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, started = processes.Popen, []

    def start(*args: Any, **options: Any) -> Any:
        started.append(args)
        if len(started) == 2:
            raise OSError("too many processes")
        return usual(*args, **options)

    monkeypatch.setattr(processes, "Popen", start)
    with pytest.raises(OSError, match="too many processes"):
        RankProcesses(CONFIG)


def test_a_rank_that_ends_before_it_has_its_options_leaves_nothing(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("sys.exit(3)")
    usual = processes.Popen

    def start_and_wait(*args: Any, **options: Any) -> Any:
        process = usual(*args, **options)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return process

    monkeypatch.setattr(processes, "Popen", start_and_wait)
    with pytest.raises(RankDeadError, match=r"rank 1 .* ended with exit code 3"):
        RankProcesses(CONFIG)


def test_all_ranks_are_stopped_before_one_is_waited_for(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them ends by itself before the others are stopped."""
    program(
        """
        while os.read(arguments[4], 2**16):
            pass
        folder = os.path.dirname(sys.argv[0])
        open(f"{folder}/stopped-{arguments[0]}", "w").close()
        while sum(name.startswith("stopped") for name in os.listdir(folder)) < 3:
            time.sleep(0.01)
        """
    )
    monkeypatch.setattr(ranks, "STOP_GRACE_S", 60.0)
    group = RankProcesses(CONFIG)
    processes = [other._process for other in group._others]
    group.close()
    assert [process.returncode for process in processes] == [0, 0, 0]


def test_ranks_that_do_not_end_are_killed(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program("time.sleep(600)")
    monkeypatch.setattr(ranks, "STOP_GRACE_S", 0.0)
    group = RankProcesses(CONFIG)
    processes = [other._process for other in group._others]
    group.close()
    group.close()
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 3


def interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_in_the_middle_of_a_result_ends_the_group(program: Any) -> None:
    program(
        """
        os.write(arguments[5], (100).to_bytes(4, "big") + b"the begin")
        while os.read(arguments[4], 2**16):
            pass
        """
    )
    memory = GroupMemory.create(2)
    staged = StagingWriter(memory.settle)
    rank = RankProcess(1, memory, staged, CONFIG)
    usual = signal.signal(signal.SIGALRM, interrupt)
    try:
        wait_until(lambda: rank._replies.poll(0), "the begin of the result")
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            rank.receive()
        assert memory.has_ended
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
        rank.end(0)
        staged.close()
        memory.close()
