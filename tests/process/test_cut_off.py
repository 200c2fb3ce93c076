"""What `shmllm generate` says, writes and returns when its engine aborts or refuses requests."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.commands import command
from support.engines import attached, named_engine, slow_steps
from support.programs import CLI, ELSEWHERE, environment, kill
from support.variants import slow
from support.waiting import PATIENCE_S, wait_until

from shmllm import LLM

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

ENDLESS = ("--ignore-eos", "--max-tokens", "900")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with named_engine(tmp_path_factory.mktemp("engine"), allow_callables=True, max_num_seqs=8) as (
        name,
        _,
    ):
        yield name


@pytest.fixture
def llm(engine: str) -> Iterator[LLM]:
    with attached(engine) as llm:
        yield llm


@contextmanager
def started(engine: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", CLI, "generate", *arguments, "--attach", engine]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        cwd=ELSEWHERE,
    )
    try:
        yield process
    finally:
        kill(process)


def abort(llm: LLM, engine: str, num_running: int, *arguments: str) -> tuple[int, str, list[str]]:
    """Abort the requests of a command while they run; its exit code, stdout and own messages."""
    with slow_steps(llm), started(engine, *arguments) as process:
        wait_until(
            lambda: llm.get_metrics()["running"] >= num_running or process.poll() is not None,
            "running requests",
        )
        assert process.poll() is None, process.communicate()
        llm.sleep(0, mode="abort")
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            llm.wake_up()
    lines = [line for line in err.decode().splitlines() if line.startswith("shmllm: ")]
    return process.returncode, out.decode(), lines


WHY = "shmllm: the engine was stopped, paused or put to sleep and aborted requests; "


@pytest.mark.parametrize(
    ("arguments", "num_running", "message"),
    [
        slow(["x"], 1, "the text is cut off"),
        (["x", "y"], 2, "2 of 2 texts are cut off"),
        slow(["x", "-n", "2", "--temperature", "1"], 2, "2 of 2 texts are cut off"),
        (["x", "--json"], 1, "1 row has no record"),
    ],
)
def test_a_text_that_the_engine_aborted_says_so(
    arguments: list[str], num_running: int, message: str, llm: LLM, engine: str
) -> None:
    code, _, lines = abort(llm, engine, num_running, *arguments, *ENDLESS)
    assert (code, lines) == (3, [WHY + message])


def test_rows_that_the_engine_aborted_or_refused_run_again(
    llm: LLM, engine: str, tmp_path: Path
) -> None:
    """More rows than may be in flight: the later ones meet an engine that takes none."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    long = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
    num_rows = 2 * llm.facts.max_num_seqs + 3
    source.write_text("".join(json.dumps(long) + "\n" for _ in range(num_rows)))
    files = ("-i", str(source), "-o", str(target))
    code, _, lines = abort(llm, engine, 2, *files)
    assert code == 3
    assert len(lines) == 1
    assert "error" not in target.read_text()
    source.write_text(source.read_text().replace("200", "1"))
    done = command("generate", *files, "--resume", "--attach", engine)
    assert done.returncode == 0
    assert len(target.read_text().splitlines()) == num_rows


@pytest.mark.parametrize("arguments", [["x"], slow(["x", "y"]), slow(["x", "--json"])])
def test_an_engine_that_sleeps_refuses_with_exit_code_3(
    arguments: list[str], llm: LLM, engine: str
) -> None:
    llm.sleep(0)
    try:
        done = command("generate", *arguments, "--attach", engine)
    finally:
        llm.wake_up()
    (line,) = (x for x in done.stderr.decode().splitlines() if x.startswith("shmllm: "))
    assert done.returncode == 3
    assert "the engine sleeps (scheduling)" in line
    assert done.stdout == b""
