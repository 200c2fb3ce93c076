"""examples/ray_data.py on a Ray cluster: whatever is killed, each row is completed exactly once."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import engine_processes
from support.client_helpers import needs, ray_environment
from support.programs import environment, read_line
from support.waiting import PATIENCE_S, holds_within, wait_until

from shmllm import LLM, SamplingParams

pytestmark = [pytest.mark.clients, needs("ray")]

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "ray_data.py"
CLUSTER = REPOSITORY / "tests" / "support" / "ray_cluster.py"
POISONED = REPOSITORY / "tests" / "support" / "ray_poisoned.py"
MAX_RETRIES = 3
NUM_ROWS = 3072
"""So many that engines still work when Ray has written the first ones."""
RUN_S = 300.0
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of programs that use the cluster, which outlives each of them."""
    temporary = tempfile.mkdtemp(prefix="ray-")
    variables = environment(ray_environment(tmp_path_factory.mktemp("cluster")))
    process = subprocess.Popen(
        [sys.executable, str(CLUSTER), temporary],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield variables | {"RAY_ADDRESS": read_line(process).strip()}
        process.communicate(timeout=PATIENCE_S)
        wait_until(lambda: not engine_processes(), "the engines end with their actors")
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        shutil.rmtree(temporary, ignore_errors=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same prompt in each row: only the seeds make the texts differ."""
    path = tmp_path_factory.mktemp("source") / "in.jsonl"
    rows = [{"id": f"row-{n}", "prompt": "def f(", "k": n} for n in range(NUM_ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def expected(source: Path) -> dict[str, str]:
    """The texts of an undisturbed engine, by id."""
    example = runpy.run_path(str(EXAMPLE))
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    with LLM(num_threads=1, kv_cache_memory_bytes=2**27) as llm:
        params = [
            SamplingParams(temperature=0.8, max_tokens=16, seed=example["seed_of"](row["id"]))
            for row in rows
        ]
        outputs = llm.generate([row["prompt"] for row in rows], params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert len(set(texts)) > NUM_ROWS // 2
    return {row["id"]: text for row, text in zip(rows, texts, strict=True)}


class Run:
    """Runs of the example that write to one directory.

    Attributes:
        process: the driver of the run that was started last.
    """

    process: subprocess.Popen[bytes]

    def __init__(self, source: Path, directory: Path, variables: dict[str, str]) -> None:
        self._arguments = [str(source), str(directory)]
        self._directory = directory
        self._environment = variables

    def start(self, program: Path = EXAMPLE, **variables: str) -> None:
        with (self._directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(program), *self._arguments],
                env=self._environment | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait(self) -> int:
        """Waits for the driver's end and returns its exit code."""
        return self.process.wait(RUN_S)

    def parts(self) -> Rows:
        """All rows that were written, in the files of all runs."""
        files = self._directory.glob("parts/*.json")
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def num_done(self) -> int:
        """The number of batches whose rows need not be computed again."""
        return sum(".pending." not in path.name for path in self._directory.glob("checkpoint/*"))

    def num_deaths(self) -> int:
        return (self._directory / "deaths").read_text().count("death")

    def texts(self) -> dict[str, str]:
        """The texts by id; no id may be there twice."""
        lines = (self._directory / "completions.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert len({row["id"] for row in rows}) == len(rows)
        assert all(row["id"] == f"row-{row['k']}" for row in rows)
        return {row["id"]: row["text"] for row in rows}

    def log(self) -> str:
        return (self._directory / "log").read_text()


@pytest.fixture
def run(source: Path, cluster: dict[str, str], tmp_path: Path) -> Iterator[Run]:
    directory = tmp_path / "out"
    directory.mkdir()
    one = Run(source, directory, cluster)
    yield one
    if hasattr(one, "process"):
        one.process.kill()
        one.process.wait(PATIENCE_S)
        print(one.log()[-8000:])
    wait_until(lambda: not engine_processes(), "engines end with their driver")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_under_way(run: Run) -> None:
    """Waits until some rows are done, and checks that others are not."""
    assert holds_within(lambda: run.num_done() > 0 or run.process.poll() is not None, RUN_S)
    assert run.process.poll() is None
    assert len(run.parts()) < NUM_ROWS


def kill_engine() -> None:
    (engine,) = engine_processes()
    os.kill(engine, signal.SIGKILL)


def kill_actor() -> None:
    (engine,) = engine_processes()
    os.kill(parent_of(engine), signal.SIGKILL)


@pytest.mark.parametrize("kill", [kill_engine, kill_actor])
def test_a_killed_engine_or_actor_is_replaced(
    run: Run, expected: dict[str, str], kill: Callable[[], None]
) -> None:
    run.start()
    wait_under_way(run)
    (before,) = engine_processes()
    kill()
    assert run.wait() == 0
    assert before not in engine_processes()
    assert run.texts() == expected


def test_a_killed_driver_is_started_again_and_computes_what_is_missing(
    run: Run, expected: dict[str, str]
) -> None:
    run.start()
    wait_under_way(run)
    os.kill(run.process.pid, signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    num_before, num_rows = run.num_done(), len(run.parts())
    run.start()
    assert run.wait() == 0
    assert run.texts() == expected
    assert f"{NUM_ROWS} completions are in" in run.log()
    assert 0 < num_before < run.num_done()
    # What the first run had done was not done again.
    num_parts = len(run.parts())
    print(f"{num_rows} rows when the driver was killed, {num_parts} at the end")
    assert num_parts < NUM_ROWS + NUM_ROWS // 4
    run.start()
    assert run.wait() == 0
    assert len(run.parts()) == num_parts
    assert run.texts() == expected


def test_a_row_that_no_engine_survives_ends_the_run(run: Run, expected: dict[str, str]) -> None:
    """Ray does not try it for ever, and what was done stays done."""
    run.start(POISONED, POISON=f"row-{NUM_ROWS // 2}")
    assert run.wait() == 1
    num_deaths, num_rows = run.num_deaths(), len(run.parts())
    print(f"the run ended after {num_deaths} engines, with {num_rows} rows")
    assert num_deaths == 1 + MAX_RETRIES
    run.start()
    assert run.wait() == 0
    assert run.texts() == expected
