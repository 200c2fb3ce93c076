"""tools/gpu_check without a GPU: its parts run in processes, and --rehearse runs all parts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.variants import slow
from support.waiting import wait_until

from shmllm.models.matrices import FORMATS

pytestmark = pytest.mark.process

TOOLS = Path(__file__).resolve().parents[2] / "tools"
EXIT_INCOMPLETE = 3

# Collects all children of its process, and so must not run in pytest's.
RUN_PARTS = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from gpu.parts import Part
from gpu.running import Runner
figures = Path(sys.argv[3])
runner = Runner([], sys.stderr, figures, figures.parent, Path(sys.argv[2]), 1.0)
found = {
    name: runner.run(Part(name, "", 60.0, ""), os.environ, budget)
    for name, budget in json.loads(sys.argv[4])
}
print(json.dumps(found))
"""
# Runs a session of parts that begin with these names; prints the exit code.
RUN_SESSION = """
import json, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from gpu.parts import Part
from gpu.session import RESERVE_S, Session
program, out, given = Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
table = [
    Part(name, "", budget, "", leaves_files=name == "compiles", code=("tools/release.py",))
    for name, budget in given["parts"]
]
ends = time.monotonic() + given["limit_s"] + RESERVE_S
with (out / "log").open("a") as log:
    session = Session(out, True, ends, log, out, print, program, table)
    again = [part for part in table if part.name in given["again"]]
    text, code = session.run(table, given["are_named"], again)
print(text)
print(code)
"""
# Does what its part is called.
PROGRAM = """
import json, os, subprocess, sys, time
name, figures = sys.argv[-3], sys.argv[-1]
earlier = json.load(open(figures))
seconds = os.environ["GPU_CHECK_SECONDS"]
json.dump(earlier | {"half": earlier.get("half", 0) + 1, "seconds": seconds}, open(figures, "w"))
if name.startswith("fails"):
    raise RuntimeError("out of tokens")
if name == "crashes":
    os.abort()
if name == "hangs":
    time.sleep(600)
if name == "leaves":
    subprocess.Popen(["sleep", "600"], start_new_session=True)
if name == "goes on" and not earlier:
    sys.exit(75)
if name == "is killed" and not earlier:
    os.kill(os.getppid(), 9)
print("done")
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives the programs of a test a directory for temporary files, in which nothing may be left,
    not even by a program that is killed."""
    directory = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(directory))
    yield
    assert not list(directory.iterdir())


def run_parts(tmp_path: Path, parts: list[tuple[str, float]]) -> dict[str, Any]:
    program, figures = tmp_path / "program.py", tmp_path / "figures.json"
    program.write_text(PROGRAM)
    command = [sys.executable, "-c", RUN_PARTS, str(TOOLS), str(program), str(figures)]
    done = subprocess.run(
        [*command, json.dumps(parts)], capture_output=True, text=True, timeout=120, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class Run:
    """A run of a session: its exit code, what it printed, and the record that it left."""

    def __init__(self, tmp_path: Path, parts: list[tuple[str, float]], **given: Any) -> None:
        program = tmp_path / "program.py"
        program.write_text(PROGRAM)
        given = {"parts": parts, "limit_s": 100.0, "are_named": False, "again": []} | given
        command = [sys.executable, "-c", RUN_SESSION, str(TOOLS), str(program), str(tmp_path)]
        done = subprocess.run(
            [*command, json.dumps(given)], capture_output=True, text=True, timeout=120
        )
        self.was_killed = done.returncode == -signal.SIGKILL
        assert self.was_killed or not done.returncode, done.stderr
        self.lines = done.stdout.splitlines()
        self.code = None if self.was_killed else int(self.lines[-1])
        self.record = json.loads((tmp_path / "gpu-check.json").read_text())

    @property
    def states(self) -> dict[str, str]:
        return {name: part["status"] for name, part in self.record["parts"].items()}


def test_a_part_that_fails_crashes_or_hangs_has_a_reason_and_figures(tmp_path):
    names = [("works", 60.0), ("fails", 60.0), ("crashes", 60.0), ("hangs", 2.5), ("works2", 60.0)]
    found = run_parts(tmp_path, names)
    assert {name: part["status"] for name, part in found.items()} == {
        "works": "ok",
        "fails": "failed",
        "crashes": "failed",
        "hangs": "timeout",
        "works2": "ok",
    }
    assert all(part["figures"]["half"] == 1 for part in found.values())
    assert found["fails"]["error"] == "RuntimeError: out of tokens (exit code 1)"
    assert found["fails"]["output"][-1] == "RuntimeError: out of tokens"
    assert "signal 6" in found["crashes"]["error"]
    assert found["works"]["error"] is None
    assert found["hangs"]["figures"]["seconds"] == "2.5"


def test_processes_that_a_part_leaves_behind_are_ended(tmp_path):
    found = run_parts(tmp_path, [("leaves", 60.0), ("works", 60.0)])
    assert [part["status"] for part in found.values()] == ["ok", "ok"]
    assert found["leaves"]["error"] == "killed processes that outlived the part: 1"


def test_a_session_stops_at_the_first_failure_and_shows_the_reason_on_one_screen(tmp_path):
    run = Run(tmp_path, [("works", 9.0), ("fails", 9.0), ("works2", 9.0)])
    assert run.code == 1
    assert run.states == {"works": "ok", "fails": "failed"}
    assert run.record["stopped"] == {
        "part": "fails",
        "status": "failed",
        "error": "RuntimeError: out of tokens (exit code 1)",
    }
    assert run.record["next"] == "fails"
    shown = run.lines[run.lines.index("fails failed: RuntimeError: out of tokens (exit code 1)") :]
    assert "RuntimeError: out of tokens" in shown
    assert len(shown) < 40


def test_a_second_run_goes_on_with_the_part_that_failed(tmp_path):
    parts = [("compiles", 9.0), ("works", 9.0), ("fails", 9.0), ("works2", 9.0)]
    Run(tmp_path, parts)
    again = Run(tmp_path, parts)
    assert again.code == 1
    assert "works: done by an earlier run" in again.lines
    assert sum(line.startswith("compiles:  (at most") for line in again.lines) == 1
    assert again.record["parts"]["works"]["figures"]["half"] == 1
    repeated = Run(tmp_path, parts, again=["works"])
    assert "works: done by an earlier run" not in repeated.lines
    mended = Run(tmp_path, [("works", 9.0), ("works2", 9.0)])
    assert (mended.code, mended.states) == (0, {"works": "ok", "works2": "ok"})
    assert mended.record["stopped"] is None
    assert mended.record["next"] is None


def test_figures_of_other_code_or_of_another_machine_do_not_count(tmp_path):
    parts = [("works", 9.0), ("works2", 9.0)]
    record = Run(tmp_path, parts).record
    record["parts"]["works"]["code"] = "another"
    record["parts"]["works2"]["machine"] = "another"
    (tmp_path / "gpu-check.json").write_text(json.dumps(record))
    run = Run(tmp_path, parts)
    assert "works: done by an earlier run" not in run.lines
    assert "works2: done by an earlier run" not in run.lines
    assert json.loads((tmp_path / "gpu-check.before.json").read_text()) == record


def test_a_killed_run_keeps_the_figures_of_its_part_and_is_resumed(tmp_path):
    parts = [("works", 9.0), ("is killed", 9.0), ("works2", 9.0)]
    killed = Run(tmp_path, parts)
    assert killed.was_killed
    assert killed.states == {"works": "ok", "is killed": "running"}
    assert json.loads((tmp_path / "gpu-check.running.json").read_text())["half"] == 1
    resumed = Run(tmp_path, parts)
    assert resumed.code == 0
    assert "works: done by an earlier run" in resumed.lines
    assert set(resumed.states.values()) == {"ok"}
    assert resumed.record["parts"]["is killed"]["figures"]["half"] == 2


def test_a_part_that_is_out_of_time_goes_on_where_it_stopped(tmp_path):
    parts = [("goes on", 9.0), ("works", 9.0)]
    first = Run(tmp_path, parts)
    assert (first.code, first.states, first.record["next"]) == (
        3,
        {"goes on": "unfinished"},
        "goes on",
    )
    second = Run(tmp_path, parts)
    assert second.code == 0
    assert second.record["parts"]["goes on"]["figures"]["half"] == 2


def test_a_part_begins_only_if_its_whole_budget_is_left(tmp_path):
    run = Run(tmp_path, [("works", 9.0), ("works2", 60.0)], limit_s=40.0)
    assert (run.code, run.states, run.record["next"]) == (3, {"works": "ok"}, "works2")
    run = Run(tmp_path, [("works", 9.0), ("works2", 60.0)], limit_s=40.0)
    assert (run.code, run.states) == (0, {"works": "ok", "works2": "ok"})
    assert float(run.record["parts"]["works2"]["figures"]["seconds"]) <= 40.0


def test_a_named_part_gets_all_the_time_that_is_left(tmp_path):
    run = Run(tmp_path, [("works", 9.0)], limit_s=90.0, are_named=True)
    assert 80.0 < float(run.record["parts"]["works"]["figures"]["seconds"]) <= 90.0
    run = Run(tmp_path, [("works", 9.0)], limit_s=90.0, again=["works"])
    assert float(run.record["parts"]["works"]["figures"]["seconds"]) == 9.0


def check(*arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "gpu_check"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def test_an_unknown_part_is_a_usage_error():
    done = check("--only", "nothing", "--out", "/nowhere", timeout=60)
    assert done.returncode == 2
    assert "no part 'nothing'; the parts are first" in done.stderr


@pytest.mark.slow
def test_an_engine_and_transformers_are_rehearsed_on_the_same_weights(tmp_path):
    parts = ("engine-1b", "transformers-1b")
    only = [word for part in parts for word in ("--only", part)]
    done = check("--rehearse", *only, "--out", str(tmp_path), timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "gpu-check.json").read_text())
    assert set(record["parts"]) == {"compile", *parts}
    ratios = record["derived"]["transformers"]["1b"]["eager"]
    assert {batch: found["agreed"] for batch, found in ratios.items()} == {"1": 1.0, "2": 1.0}


@pytest.mark.slow
def test_the_kernels_that_read_packed_weights_are_rehearsed(tmp_path):
    done = check("--rehearse", "--only", "packed", "--out", str(tmp_path), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "gpu-check.json").read_text())["parts"]["packed"]["figures"]
    (errors,), (times,) = figures["errors"].values(), figures["linear"].values()
    assert errors.keys() == times.keys() - {"torch.mm"} == FORMATS.keys()
    assert all(error <= 1 for error in errors.values())
    assert all({"1", "2"} == by_rows.keys() for by_rows in times.values())
    assert "| 40 x 256 | q4_k |" in (tmp_path / "gpu-check.md").read_text()


@pytest.mark.slow
def test_the_sums_of_two_ranks_are_rehearsed(tmp_path):
    done = check("--rehearse", "--only", "ranks", "--out", str(tmp_path), timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "gpu-check.json").read_text())["parts"]["ranks"]["figures"]
    assert figures["sums"].keys() == {"1", "3"}
    assert all({"us", "nccl_us"} == each.keys() for each in figures["sums"].values())


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    done = check("--rehearse", "--out", str(tmp_path / "file" / "out"), timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_check: ")
    assert len(done.stderr.splitlines()) == 1


def test_wheels_from_nowhere_are_a_usage_error(tmp_path):
    done = check("--wheels", str(tmp_path / "x"), "--out", str(tmp_path), timeout=60)
    assert done.returncode == 2
    assert "no folder" in done.stderr


@contextmanager
def rehearse_first(out: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Starts a rehearsal; yields its process, and the pid of its first part's process."""
    command = [sys.executable, str(TOOLS / "gpu_check"), "--rehearse", "--out", str(out)]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has children ignore it
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    signal.signal(signal.SIGHUP, before)
    with process:
        try:
            assert process.stdout is not None
            assert "first: a minute" in process.stdout.readline()
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            wait_until(lambda: children.read_text().split(), "a part's process")
            yield process, int(children.read_text())
        finally:
            process.kill()


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(
    ("number", "code"),
    [slow(signal.SIGHUP, 129), slow(signal.SIGINT, 130), (signal.SIGTERM, 143)],
)
def test_a_signal_ends_the_part_that_runs(tmp_path, number, code):
    with rehearse_first(tmp_path) as (process, part):
        os.kill(process.pid, number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert said.strip() == f"gpu_check: stopped; the completed parts are in {tmp_path}"
    assert has_ended(part)
    parts = json.loads((tmp_path / "gpu-check.json").read_text())["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {"first": "running"}
    assert not list(tmp_path.glob("*.tmp*"))


def test_the_part_that_runs_ends_with_a_process_that_is_killed(tmp_path):
    figures = tmp_path / "gpu-check.running.json"
    with rehearse_first(tmp_path) as (process, part):
        wait_until(lambda: "reached" in figures.read_text(), "the part's first step")
        os.kill(part, signal.SIGSTOP)  # so that it does not end by itself
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        try:
            wait_until(lambda: has_ended(part), "the end of the part's process")
        finally:
            if not has_ended(part):
                os.kill(part, signal.SIGKILL)


@pytest.mark.slow
def test_the_rehearsal_takes_every_part(tmp_path):
    for _ in range(3):  # a slow machine leaves the longest part to the next command
        done = check("--rehearse", "--out", str(tmp_path), timeout=1800)
        if done.returncode != EXIT_INCOMPLETE:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "gpu-check.json").read_text())
    assert record["rehearsal"] is True
    assert {part["status"] for part in record["parts"].values()} == {"ok"}
    # All that is asked was measured, if only as a rehearsal; the tests are skipped.
    unknown = [target["name"] for target in record["targets"] if target["measured"] is None]
    assert unknown == ["GPU tests that fail"]
    assert {target["ok"] for target in record["targets"]} == {None}
    for size in ("1b", "8b"):
        found = record["derived"]["transformers"][size]["eager"]
        assert {ratios["agreed"] for ratios in found.values()} == {1.0}
    first = record["parts"]["first"]["figures"]
    assert first["reached"] == "sanitizer"
    assert first["sanitizer"]["status"] == "not carried"
    assert record["parts"]["compile"]["figures"]["compiled"] == 2
    arms = record["parts"]["ablations"]["figures"]["arms"]
    assert sum(name.endswith("persistent") for name in arms) == 1 < len(arms)
    text = (tmp_path / "gpu-check.md").read_text()
    assert "no GPU figures" in text.splitlines()[0]
    rows = [
        row
        for name, part in record["parts"].items()
        if name.startswith("tune")
        for row in part["figures"]["tiles"]["rows"]
    ]
    assert {row["kernel"] for row in rows} == {
        *("decode", "split_decode", "prefill", "latent", "product", "packed_product"),
        *("single_row", "packed_row", "few_rows", "packed_few_rows", "many_rows"),
        *("cache_order", "decoder", "ahead"),
    }
    assert all(len(times) >= 2 for row in rows for times in row["us"].values())


def prepare(directory: Path, part: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "gpu_check"), "--prepare", str(directory)]
    return subprocess.run(
        [*command, "--only", part, "--rehearse"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("part", ["tune-ahead", "tests-steps", "tests-kernels"])
def test_kernels_are_compiled_where_there_is_no_gpu(part: str, tmp_path: Path) -> None:
    """Only what a launch reads is left."""
    done = prepare(tmp_path / "kernels", part)
    assert done.returncode == 0, done.stderr
    counts = re.fullmatch(rf"{part}: (\d+) kernels, (\d+) new, \d+ s\n", done.stdout)
    assert counts, done.stdout
    assert int(counts[1]) >= int(counts[2]) >= 2
    suffixes = {path.suffix for path in (tmp_path / "kernels").glob("*/*")}
    assert suffixes == {".cubin", ".json"}


def test_what_cannot_be_prepared_is_one_line(tmp_path: Path) -> None:
    done = prepare(tmp_path, "first")
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_check: --prepare is for the parts compile, family-")
    (tmp_path / "file").touch()
    done = prepare(tmp_path / "file" / "kernels", "tune-ahead")
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_check: ")
    assert len(done.stderr.splitlines()) == 1
