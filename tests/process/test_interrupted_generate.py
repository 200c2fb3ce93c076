"""Ctrl-C at random times of `shmllm generate` keeps finished results and leaves no process.

SHMLLM_INTERRUPTS sets how many (2); SHMLLM_TEST_SEED repeats a run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import engine_processes
from support.programs import CLI, SLOW_CLI, environment
from support.waiting import PATIENCE_S, holds_within

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

NUM_INTERRUPTS = int(os.environ.get("SHMLLM_INTERRUPTS", "2"))
SEED = int(os.environ.get("SHMLLM_TEST_SEED", str(time.time_ns() % 10**9)))
NUM_PROMPTS = 60
EXIT_INTERRUPTED = 130
# `python -c` stands for the installed command. An interrupt before `main` has begun ends the
# interpreter itself; shells call that 130 too.
WITH_DEFAULT_HANDLER = "import signal; signal.signal(2, signal.default_int_handler); "


def command(prompts: Path, target: Path, cli: str = CLI) -> list[str]:
    options = ["--max-tokens", "32", "--ignore-eos"]
    return [
        sys.executable,
        "-c",
        WITH_DEFAULT_HANDLER + cli,
        "generate",
        "-i",
        str(prompts),
        "-o",
        str(target),
        "--num-threads",
        "1",
        "--max-num-seqs",
        "8",
        *options,
    ]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("".join(f"value_{i} = {i} +\n" for i in range(NUM_PROMPTS)))
    return path


@pytest.fixture(scope="module")
def whole(prompts: Path) -> tuple[bytes, float]:
    """The output of an uninterrupted run, and how long it takes in seconds."""
    target = prompts.with_name("whole.jsonl")
    began = time.monotonic()
    done = subprocess.run(
        command(prompts, target),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment(),
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return target.read_bytes(), time.monotonic() - began


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def interrupt(prompts: Path, target: Path, after_s: float, after_lines: int) -> tuple[int, str]:
    """Run the command and send SIGINT after some time and results; return exit code and stderr."""
    process = subprocess.Popen(
        command(prompts, target, SLOW_CLI),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    try:
        time.sleep(after_s)
        assert holds_within(
            lambda: num_lines(target) >= after_lines or process.poll() is not None, PATIENCE_S
        )
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait(PATIENCE_S)
    return process.returncode, complaints.decode()


def test_an_interrupt_keeps_what_was_finished(
    prompts: Path, whole: tuple[bytes, float], tmp_path: Path
) -> None:
    print(f"seed {SEED}")
    reference, takes_s = whole
    assert len(reference.splitlines()) == NUM_PROMPTS
    rng = random.Random(SEED)
    before = engine_processes()
    written = []
    for turn in range(NUM_INTERRUPTS):
        # Half of them anywhere, half of them where there are some results but not all.
        if turn % 2:
            after_s, after_lines = rng.uniform(0, 0.02), rng.randrange(1, NUM_PROMPTS // 2)
        else:
            after_s, after_lines = rng.uniform(0, takes_s), 0
        target = tmp_path / f"{turn}.jsonl"
        code, complaints = interrupt(prompts, target, after_s, after_lines)
        where = f"seed {SEED}, turn {turn}, after {after_s:.3f} s: {complaints}"
        kept = target.read_bytes() if target.exists() else b""
        assert reference.startswith(kept), where
        assert kept == b"" or kept.endswith(b"\n"), where
        written.append(len([json.loads(line) for line in kept.splitlines()]))
        if code == 0:
            assert kept == reference, f"{where}: the interrupt got lost"
        else:
            assert code in (EXIT_INTERRUPTED, -signal.SIGINT), where
            assert code == EXIT_INTERRUPTED or "interrupted" not in complaints, where
            assert code == EXIT_INTERRUPTED or not target.exists(), where
        assert "Traceback" not in complaints or code == -signal.SIGINT, where
        assert holds_within(lambda: engine_processes() == before, PATIENCE_S), where
    print("results kept:", written)
    assert any(0 < num < NUM_PROMPTS for num in written), "none came in the middle"
