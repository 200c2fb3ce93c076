"""Ray Data on shmllm: engines in actors, engines that die there, and Ray's processor for vLLM."""

from __future__ import annotations

import ast
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import engine_processes
from support.client_helpers import needs, ray_environment
from support.programs import environment, python
from support.waiting import PATIENCE_S, holds_within, wait_until

from shmllm import LLM, SamplingParams
from shmllm.frontend.model_files import resolve_model

pytestmark = [pytest.mark.clients, needs("ray")]

DRIVER = Path(__file__).resolve().parents[1] / "support" / "ray_driver.py"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCENARIO_S = 600.0
ROWS = [{"id": n, "prompt": f"def function_{n}("} for n in range(40)]
MAX_TOKENS = 128
NUM_BATCHES = 5
# Which scenarios lose their engine, and after how many batches or requests were begun.
KILLS = {"raising": 2, "restarted": 2, "processor": 30}


@dataclass
class Outcome:
    """The result of a scenario: all rows or an error message, and the number of batches begun."""

    rows: Any
    num_begun: int


def num_marks(file: Path) -> int:
    return file.read_text().count("begun") if file.exists() else 0


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Run the driver's scenarios; in two of them the test kills the engine in its actor."""
    directory = tmp_path_factory.mktemp("ray")
    job = {
        "rows": ROWS,
        "max_tokens": MAX_TOKENS,
        "batch_size": len(ROWS) // NUM_BATCHES,
        "model": str(resolve_model("tiny")),
        "temporary": tempfile.mkdtemp(prefix="ray-"),  # sockets in it: the path must be short
    }
    (directory / "job.json").write_text(json.dumps(job))
    with (directory / "log").open("wb") as log:
        driver = subprocess.Popen(
            [sys.executable, str(DRIVER), str(directory)],
            env=environment(ray_environment(directory)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        for name, count in KILLS.items():
            marks = directory / name
            assert holds_within(lambda m=marks, n=count: num_marks(m) >= n, SCENARIO_S), name
            for pid in engine_processes():
                os.kill(pid, signal.SIGKILL)
        assert driver.wait(SCENARIO_S) == 0
        wait_until(lambda: not engine_processes(), "the engines end with their actors")
    finally:
        driver.kill()
        driver.wait(PATIENCE_S)
        shutil.rmtree(job["temporary"], ignore_errors=True)
        print((directory / "log").read_text()[-8000:])
    results = json.loads((directory / "results.json").read_text())
    return {name: Outcome(rows, num_marks(directory / name)) for name, rows in results.items()}


@pytest.fixture
def run_example(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Runs an example in a directory of its own, and returns what it wrote to stdout."""
    temporary = tempfile.mkdtemp(prefix="ray-")
    changes = ray_environment(tmp_path) | {"RAY_TMPDIR": temporary}

    def run(name: str) -> str:
        done = python(str(EXAMPLES / name), env=changes, cwd=tmp_path, timeout=SCENARIO_S)
        assert done.returncode == 0, done.stderr.decode()[-8000:]
        return done.stdout.decode()

    yield run
    shutil.rmtree(temporary, ignore_errors=True)


@pytest.mark.usefixtures("no_leaks")
def test_the_example_of_actors(run_example: Callable[[str], str], tmp_path: Path) -> None:
    run_example("ray_data.py")
    lines = (tmp_path / "completions" / "completions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert sorted(row["id"] for row in rows) == list(range(200))
    assert all(row["prompt"] == f"def f{row['id']}(" and row["text"] for row in rows)


@pytest.mark.usefixtures("no_leaks")
def test_the_example_of_rays_processor(run_example: Callable[[str], str]) -> None:
    out = run_example("ray_processor.py")
    rows = [ast.literal_eval(line) for line in out.splitlines() if line.startswith("{")]
    assert sorted(row["question"] for row in rows) == sorted(
        f"Add {n} to a number." for n in range(40)
    )
    assert all(row["answer"] for row in rows)


def completed(params: list[SamplingParams]) -> dict[int, str]:
    """The completions of all rows by one `LLM`."""
    with LLM(num_threads=1, kv_cache_memory_bytes=2**27) as llm:
        outputs = llm.generate([row["prompt"] for row in ROWS], params, use_tqdm=False)
    return {n: output.outputs[0].text for n, output in enumerate(outputs)}


@pytest.fixture(scope="module")
def expected() -> dict[int, str]:
    """What the example's actors make."""
    seed_of = runpy.run_path(str(EXAMPLES / "ray_data.py"))["seed_of"]
    seeds = [seed_of(row["id"]) for row in ROWS]
    return completed(
        [SamplingParams(temperature=0.8, max_tokens=MAX_TOKENS, seed=seed) for seed in seeds]
    )


@pytest.fixture(scope="module")
def greedy() -> dict[int, str]:
    return completed([SamplingParams(temperature=0, max_tokens=MAX_TOKENS)] * len(ROWS))


def assert_all_once(rows: Any, expected: dict[int, str]) -> None:
    assert isinstance(rows, list), rows
    assert len(rows) == len(expected)
    assert {row["id"]: row["text"] for row in rows} == expected


def test_rows_out_are_rows_in(outcomes: dict[str, Outcome], expected: dict[int, str]) -> None:
    assert_all_once(outcomes["undisturbed"].rows, expected)
    assert outcomes["undisturbed"].num_begun == NUM_BATCHES


def test_a_dead_engine_raises_at_once(outcomes: dict[str, Outcome]) -> None:
    assert isinstance(outcomes["raising"].rows, str)
    assert "EngineDeadError" in outcomes["raising"].rows
    assert outcomes["raising"].num_begun < NUM_BATCHES  # the rest was not even begun


def test_a_new_actor_completes_every_row_once(
    outcomes: dict[str, Outcome], expected: dict[int, str]
) -> None:
    assert_all_once(outcomes["restarted"].rows, expected)
    assert outcomes["restarted"].num_begun > NUM_BATCHES


def test_rays_own_processor_completes_every_row_once(
    outcomes: dict[str, Outcome], greedy: dict[int, str]
) -> None:
    """Ray ends the actor when it sees vLLM's EngineDeadError, which is ours here."""
    assert_all_once(outcomes["processor"].rows, greedy)
    assert outcomes["processor"].num_begun > len(ROWS)
    assert all(0 < row["num_logprobs"] <= MAX_TOKENS for row in outcomes["processor"].rows)


def test_rays_own_processor_embeds(outcomes: dict[str, Outcome]) -> None:
    rows = outcomes["embedded"].rows
    assert isinstance(rows, list), rows
    with LLM(num_threads=1, kv_cache_memory_bytes=2**27) as llm:
        outputs = llm.embed([row["prompt"] for row in ROWS], use_tqdm=False)
    expected = {n: output.outputs.embedding for n, output in enumerate(outputs)}
    assert sorted(row["id"] for row in rows) == sorted(expected)
    for row in rows:
        assert row["vector"] == pytest.approx(expected[row["id"]], abs=1e-5)
