"""Jobs killed at random times and resumed write the rows of an uninterrupted run.

SHMLLM_BATCH_KILLS sets how many kills the short test makes; SHMLLM_TEST_SEED repeats a run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import engine_processes
from support.programs import CLI, SLOW_CLI, children, python, start_source
from support.waiting import PATIENCE_S, holds_within

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

NUM_KILLS = int(os.environ.get("SHMLLM_BATCH_KILLS", "1"))
SEED = int(os.environ.get("SHMLLM_TEST_SEED", str(time.time_ns() % 10**9)))
MANY_KILLS = 50
ROWS_PER_KILL = 12
START_S = 1.2
"""About as long as a start takes: a second more, and a fast machine has done all rows."""
OPTIONS = ("--max-tokens", "8", "--ignore-eos", "--max-num-seqs", "4", "--num-threads", "1")
PADDING = "x" * 100_000  # makes writing a line take a while
EXIT_FAILED_ROWS = 1
EXIT_ENGINE_DIED = 3


def rows(num: int) -> list[Any]:
    """Rows, some of them bad, with prompts shorter than a KV block, which are never cached."""
    made: list[Any] = []
    for i in range(num):
        row: dict[str, Any] = {"id": f"row-{i}", "prompt": f"x{i} =", "k": [i]}
        if i % 5 == 0:
            row["padding"] = PADDING
        if i % 7 == 0:
            row["sampling_params"] = {"max_tokens": 1 + i % 6}
        made.append("" if i % 11 == 3 else "bad" if i % 13 == 5 else row)
    return made


def arguments(source: Path, target: Path) -> list[str]:
    return ["generate", "-i", str(source), "-o", str(target), "--resume", *OPTIONS]


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


class Killer:
    """Starts a job again and again, and kills it or its engine."""

    def __init__(self, source: Path, target: Path, num_rows: int, seed: int) -> None:
        self._num_rows = num_rows
        self.kills: Counter[str] = Counter()
        self._source = source
        self._target = target
        self._rng = random.Random(seed)

    def run_and_kill(self) -> None:
        process = start_source(
            SLOW_CLI, *arguments(self._source, self._target), stderr=subprocess.PIPE
        )
        try:
            self._wait(process)
            whom = self._kill(process)
            _, stderr = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
            process.wait(PATIENCE_S)
        self.kills[whom] += 1
        if whom == "job":
            assert process.returncode == -signal.SIGKILL, stderr.decode()
        elif whom == "engine":
            # Before it is ready its end is that of a start that failed, and when the last row
            # is done nobody needs it any more.
            expected = {2, EXIT_ENGINE_DIED}
            if num_lines(self._target) == self._num_rows:
                expected.add(EXIT_FAILED_ROWS)
            assert process.returncode in expected, stderr.decode()
            assert b"Traceback" not in stderr

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for some records, or for a time during the start."""
        if self._rng.random() < 0.25:
            time.sleep(self._rng.uniform(0, START_S))
            return
        wanted = num_lines(self._target) + self._rng.randrange(1, ROWS_PER_KILL)
        assert holds_within(
            lambda: num_lines(self._target) >= wanted or process.poll() is not None, PATIENCE_S
        )
        time.sleep(self._rng.uniform(0, 0.005))

    def _kill(self, process: subprocess.Popen[bytes]) -> str:
        engines = children(process.pid)
        if process.poll() is not None:
            return "nobody"
        if engines and self._rng.random() < 0.5:
            os.kill(engines[0], signal.SIGKILL)
            return "engine"
        process.kill()
        return "job"


def whole_lines(content: bytes) -> list[bytes]:
    return [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]


def check_kills(directory: Path, num_kills: int, seed: int) -> None:
    print(f"seed {seed}")
    source = directory / "in.jsonl"
    lines = [r if isinstance(r, str) else json.dumps(r) for r in rows(num_kills * ROWS_PER_KILL)]
    source.write_text("".join(line + "\n" for line in lines))
    reference, target = directory / "whole.jsonl", directory / "out.jsonl"
    done = python("-c", CLI, *arguments(source, reference), timeout=10 * PATIENCE_S)
    assert done.returncode == EXIT_FAILED_ROWS, done.stderr.decode()
    expected = whole_lines(reference.read_bytes())
    assert len(expected) == sum(line != "" for line in lines)

    killer, before, num_torn = Killer(source, target, len(expected), seed), b"", 0
    for turn in range(num_kills):
        killer.run_and_kill()
        kept = target.read_bytes() if target.exists() else b""
        where = f"seed {seed}, turn {turn}"
        kept_lines = whole_lines(kept)
        assert kept.startswith(b"".join(whole_lines(before))), where
        assert len(set(kept_lines)) == len(kept_lines), where
        assert set(kept_lines) <= set(expected), where
        num_torn += not kept.endswith(b"\n") and kept != b""
        before = kept
    done = python("-c", CLI, *arguments(source, target), timeout=10 * PATIENCE_S)
    assert done.returncode == EXIT_FAILED_ROWS, done.stderr.decode()
    print(f"{dict(killer.kills)}, {num_torn} torn lines, {len(whole_lines(before))} rows kept")
    assert sorted(target.read_bytes().splitlines(keepends=True)) == sorted(expected)
    assert holds_within(lambda: not engine_processes(), PATIENCE_S)
    assert killer.kills["job"] + killer.kills["engine"] >= num_kills // 2


def test_no_row_is_lost_or_repeated_after_a_few_kills(tmp_path: Path) -> None:
    check_kills(tmp_path, NUM_KILLS, SEED)


@pytest.mark.stress
def test_no_row_is_lost_or_repeated_after_many_kills(tmp_path: Path) -> None:
    check_kills(tmp_path, MANY_KILLS, SEED)
