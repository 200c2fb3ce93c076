"""Trainer processes that share an engine: equal answers and errors, and what a killed one leaves.

`support.shared_engine_driver` is the program of each process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import shared_engine_driver
from support.programs import environment_of_test_files, free_port, kill, read_line
from support.variants import slow
from support.waiting import PATIENCE_S

from shmllm import LLM

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

DRIVER = str(Path(shared_engine_driver.__file__))
LEADER, OTHER = range(shared_engine_driver.NUM_PROCESSES)


class Processes:
    """The processes of a group, each of which waits for the name of an action."""

    def __init__(self, directory: Path, deadline_s: int) -> None:
        self.all = [
            subprocess.Popen(
                [sys.executable, DRIVER, str(directory), str(rank), str(deadline_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment_of_test_files(),
                text=True,
            )
            for rank in (LEADER, OTHER)
        ]

    def ask(self, rank: int, action: str) -> None:
        stdin = self.all[rank].stdin
        assert stdin is not None
        stdin.write(f"{action}\n")
        stdin.flush()

    def answer(self, rank: int) -> Any:
        return json.loads(read_line(self.all[rank]))

    def both(self, action: str) -> list[Any]:
        for rank in (LEADER, OTHER):
            self.ask(rank, action)
        return [self.answer(rank) for rank in (LEADER, OTHER)]


@contextmanager
def started(directory: Path, deadline_s: int = 600) -> Iterator[Processes]:
    processes = Processes(directory, deadline_s)
    try:
        assert [processes.answer(rank) for rank in (LEADER, OTHER)] == ["ready"] * 2
        yield processes
        for process in processes.all:
            process.communicate(timeout=PATIENCE_S)
    finally:
        for process in processes.all:
            kill(process)


@pytest.mark.slow
def test_all_processes_have_the_results_and_the_errors_of_one_engine(tmp_path: Path) -> None:
    with LLM("tiny", multiprocess=False) as llm:
        expected = shared_engine_driver.texts(llm)
    with started(tmp_path) as processes:
        assert processes.both("has engine") == [True, False]
        assert processes.both("ranks") == [2, 2]
        one, other = processes.both("facts")
        assert one == other
        assert processes.both("texts") == [expected] * 2
        assert processes.both("update") == [1, 1]
        assert processes.both("version") == [7, 7]
        one, other = processes.both("update wrongly")
        assert one == other
        assert one.startswith("RequestError: the model has no weight 'no.such.weight'")
        assert processes.both("sleep") == [True, True]
        assert processes.both("wake") == [True, True]
        one, other = processes.both("differ")
        assert one == 7
        assert "called list_loras and the one that has the engine get_weight_version" in other
        processes.both("end engine")
        for answer in processes.both("texts") + processes.both("version"):
            assert answer.startswith("EngineDeadError")
            assert "SIGKILL" in answer


@pytest.mark.parametrize("killed", list(map(slow, (LEADER, OTHER))))
def test_a_killed_process_leaves_nothing_and_the_other_one_raises(
    tmp_path: Path, killed: int
) -> None:
    left = OTHER if killed == LEADER else LEADER
    kind = "ShmLLMError: another" if left == LEADER else "EngineDeadError: process 0"
    with started(tmp_path) as processes:
        processes.all[killed].kill()
        processes.all[killed].wait(PATIENCE_S)
        processes.ask(left, "texts")
        answer = processes.answer(left)
    assert answer.startswith(kind)
    assert "ended, or did not call for 0:10:00" in answer


@pytest.mark.slow
def test_a_process_waits_no_longer_than_the_deadline(tmp_path: Path) -> None:
    with started(tmp_path, deadline_s=30) as processes:
        os.kill(processes.all[LEADER].pid, signal.SIGSTOP)
        processes.ask(OTHER, "texts")
        answer = processes.answer(OTHER)
        os.kill(processes.all[LEADER].pid, signal.SIGCONT)
    assert answer.startswith("EngineDeadError: process 0")


LAUNCHED = """
import torch.distributed as dist
from shmllm.compat import vllm
vllm.install()
from vllm import LLM, SamplingParams
llm = LLM(
    "tiny", tensor_parallel_size=2, distributed_executor_backend="external_launcher",
    kv_cache_memory_bytes=2**26,
)
(output,) = llm.generate(["import os"], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
print(dist.get_rank(), llm.engine_pid, list(output.outputs[0].token_ids))
llm.close()
"""


@pytest.mark.slow
def test_a_program_for_vllm_under_a_launcher() -> None:
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LAUNCHED],
            stdout=subprocess.PIPE,
            env=environment_of_test_files()
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            text=True,
        )
        for rank in range(2)
    ]
    try:
        lines = [each.communicate(timeout=PATIENCE_S)[0].split(maxsplit=1) for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.wait()
    assert [each.returncode for each in processes] == [0, 0]
    assert [rank for rank, _ in lines] == ["0", "1"]
    assert lines[0][1] == lines[1][1]
