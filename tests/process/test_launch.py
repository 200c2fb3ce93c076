"""An engine starts from any program and directory, with an environment of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import engine_processes
from support.programs import environment, python, result_of, run_source
from support.waiting import PATIENCE_S, join_all

from shmllm import LLM, SamplingParams
from shmllm.client.launch import ChildEngineHandle
from shmllm.client.private import CLOSE_GRACE_S, PrivateEngineClient
from shmllm.config.environment import SPIN_COUNT, WAITING_VARIABLES, engine_environment
from shmllm.frontend.options.engine_options import make_engine_config

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

PROMPT = "def fibonacci(n):"
PROGRAM = f"""
import json
from shmllm import LLM, SamplingParams
llm = LLM()
(output,) = llm.generate({PROMPT!r}, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
print(json.dumps(output.outputs[0].token_ids))
"""
REPORT = """
import json, os
from pathlib import Path
from shmllm import LLM
with LLM(max_model_len=64) as llm:
    mine, engines = Path("/proc/self"), Path(f"/proc/{llm._client.pid}")
    print(json.dumps({
        "environment": (engines / "environ").read_text().split("\\0"),
        "num_threads": llm.facts.num_threads,
        "stdin": os.readlink(engines / "fd/0"),
        "stdout": os.readlink(engines / "fd/1"),
        "my_stdout": os.readlink(mine / "fd/1"),
        "my_stderr": os.readlink(mine / "fd/2"),
        "directory": os.readlink(engines / "cwd"),
        "session": os.getsid(llm._client.pid) == llm._client.pid,
        "cores": len(os.sched_getaffinity(0)),
    }))
"""


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """The tokens that an engine in this process generates."""
    with LLM(multiprocess=False) as llm:
        return tokens_of(llm)


def tokens_of(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=6)
    return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.slow
def test_from_standard_input(expected: list[int]) -> None:
    assert result_of(python("-", input=PROGRAM.encode())) == expected


def write_hostile(directory: Path, *names: str) -> None:
    directory.mkdir(exist_ok=True)
    for name in names:
        (directory / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")


@pytest.mark.slow
def test_from_a_directory_whose_files_are_named_like_modules(
    tmp_path: Path, expected: list[int]
) -> None:
    """A script, which has no main guard, does not search the directory it is started from;
    nor may its engine."""
    here = tmp_path / "here"
    write_hostile(here, "json", "numpy", "torch", "shmllm", "select", "site", "safetensors")
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    assert result_of(python(str(script), cwd=here)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("way", ["script", pytest.param("-c", marks=pytest.mark.slow)])
def test_beside_files_named_like_modules_that_only_the_engine_needs(
    tmp_path: Path, expected: list[int], way: str
) -> None:
    """Python searches the script's directory first, or with -c the current one. The front end
    imports none of these modules, and the engine does not search there."""
    write_hostile(tmp_path, "torch", "safetensors", "shmllm_kernels", "transformers")
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    arguments = [str(script)] if way == "script" else ["-c", PROGRAM]
    assert result_of(python(*arguments, cwd=tmp_path)) == expected


@pytest.mark.slow
def test_with_ignored_child_signals(expected: list[int]) -> None:
    source = "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n" + PROGRAM
    assert result_of(run_source(source + "llm.close()\n")) == expected


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
def test_with_closed_standard_streams(closed: str, expected: list[int]) -> None:
    """The segments then get the descriptors 0 and 2, which a child's streams need."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", PROGRAM],
        capture_output=True,
        env=environment(),
        timeout=PATIENCE_S,
        check=False,
    )
    assert result_of(done) == expected


def test_when_every_standard_stream_is_closed(tmp_path: Path, expected: list[int]) -> None:
    """As for a daemon. The program writes its result to a file."""
    target = tmp_path / "tokens"
    source = PROGRAM.replace("print(", f"open({str(target)!r}, 'w').write(")
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", source],
        env=environment(),
        timeout=PATIENCE_S,
        check=False,
    )
    assert target.exists(), f"the program failed with exit code {done.returncode}"
    assert json.loads(target.read_text()) == expected


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """The environment of an engine whose front end has variables that ask for one thread."""
    variables = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MARK": "kept"}
    return dict(result_of(run_source(REPORT, env=variables)))


def test_the_engine_takes_the_machines_threads(report: dict[str, Any]) -> None:
    assert report["num_threads"] == report["cores"]
    names = {line.partition("=")[0] for line in report["environment"]}
    assert not names & {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}
    assert "MARK=kept" in report["environment"]


def test_the_engine_has_neither_stdin_nor_stdout_of_the_front_end(report: dict[str, Any]) -> None:
    assert report["stdin"] == os.devnull
    assert report["stdout"] == report["my_stderr"]
    assert report["stdout"] != report["my_stdout"]


def test_the_engine_has_a_session_and_a_directory_of_its_own(report: dict[str, Any]) -> None:
    assert report["session"]
    assert report["directory"] == "/"


@pytest.fixture
def graces(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that engines are given to end by themselves, in the order they are ended in."""
    given: list[float] = []
    stop = ChildEngineHandle.stop

    def recorded(engine: ChildEngineHandle, grace_s: float) -> None:
        given.append(grace_s)
        stop(engine, grace_s)

    monkeypatch.setattr(ChildEngineHandle, "stop", recorded)
    return given


@pytest.mark.slow
def test_two_at_once_one_of_them_from_a_thread_that_has_ended(
    expected: list[int], graces: list[float]
) -> None:
    started: list[LLM] = []
    thread = threading.Thread(target=lambda: started.append(LLM(max_model_len=128)))
    thread.start()
    join_all([thread])
    with started[0] as first, LLM(max_model_len=128) as second:
        assert first._client.pid != second._client.pid
        assert tokens_of(first) == tokens_of(second) == expected
        second.close()
        assert set(graces) == {CLOSE_GRACE_S}
        assert tokens_of(first) == expected


def test_without_a_process(expected: list[int]) -> None:
    before = engine_processes()
    with LLM(multiprocess=False) as llm:
        assert engine_processes() <= before
        assert tokens_of(llm) == expected


@pytest.mark.slow
def test_a_signal_for_the_front_ends_process_group_does_not_reach_the_engine(
    expected: list[int],
) -> None:
    source = PROGRAM.replace(
        "llm = LLM()",
        "import os, signal\n"
        "os.setpgid(0, 0)\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "llm = LLM()\n"
        f"os.killpg(0, {int(signal.SIGINT)})",
    )
    assert result_of(run_source(source)) == expected


def test_an_engine_that_still_starts_is_ended_at_once(graces: list[float]) -> None:
    """A starting engine may not answer for seconds, like this stopped one; Ctrl-C must not wait."""
    starting = PrivateEngineClient(make_engine_config("tiny"))
    os.kill(starting.pid, signal.SIGSTOP)
    starting.close()
    assert graces[0] == 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": SPIN_COUNT}),
        ({"OMP_WAIT_POLICY": "passive"}, {"OMP_WAIT_POLICY": "passive"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
    ],
)
def test_compute_threads_spin_briefly_unless_told_otherwise(
    given: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in WAITING_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    environment = engine_environment()
    assert {
        name: environment[name] for name in WAITING_VARIABLES if name in environment
    } == expected
