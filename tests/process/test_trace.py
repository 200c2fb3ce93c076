"""`shmllm trace`: complete traces of real processes, also of killed ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.commands import command
from support.engines import assert_unused, named_engine
from support.programs import (
    CLI,
    ELSEWHERE,
    children,
    environment,
    kill,
    python,
    read_line,
    start_source,
)
from support.traces import Request, Trace, load
from support.variants import slow
from support.waiting import PATIENCE_S, holds_within

from shmllm.tracing.layout import Type
from shmllm.tracing.reading import read_all

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

ENGINE_PHASES = {"schedule", "prepare", "execute", "sample", "apply", "publish"}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory of the test, which must be empty again at the end."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    yield directory
    assert list(directory.glob("shmllm-trace*")) == []


def traced(path: Path, *command: str) -> subprocess.CompletedProcess[bytes]:
    return python("-c", CLI, "trace", "-o", str(path), "--", *command)


def start_attached(name: str, path: Path, seconds: float = 60.0) -> subprocess.Popen[bytes]:
    options = ["--attach", name, "--seconds", str(seconds), "-o", str(path)]
    return subprocess.Popen(
        [sys.executable, "-c", CLI, "trace", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        cwd=ELSEWHERE,
    )


def by_number(trace: Trace) -> dict[int, Request]:
    return {int(key.split(".")[1]): request for key, request in trace.requests.items()}


def lanes_by_role(trace: Trace) -> dict[str, set[str]]:
    """The names of the slices, by 'front end' and 'engine'."""
    roles = {
        pid: name.split(",")[0].split(" test-")[0] for pid, name in trace.process_names().items()
    }
    found: dict[str, set[str]] = {}
    for (pid, _), slices in trace.lanes.items():
        found.setdefault(roles[pid], set()).update(name for _, _, name, _ in slices)
    return found


@pytest.mark.parametrize(
    "options", [slow(("--num-threads", "1")), ("--engines", "2")], ids=" ".join
)
def test_a_command_s_trace_has_every_request_once(options: tuple[str, ...], tmp_path: Path) -> None:
    source, target, path = (tmp_path / n for n in ("in.jsonl", "out.jsonl", "trace.json"))
    rows = [{"prompt": "x = 1\n" * n, "sampling_params": {"max_tokens": n}} for n in range(1, 20)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = traced(path, "generate", "-i", str(source), "-o", str(target), *options)
    assert done.returncode == 0, done.stderr.decode()
    records = [json.loads(line) for line in target.read_text().splitlines()]
    trace = load(path)
    requests = by_number(trace)
    assert sorted(requests) == list(range(19))
    for record in records:
        request = requests[record["line"] - 1]
        facts = request.facts
        assert facts["whole"]
        assert facts["prompt tokens"] == record["num_prompt_tokens"]
        assert facts["output tokens"] == record["num_output_tokens"]
        assert facts["cached tokens"] == record["num_cached_tokens"]
        assert facts["finish reason"] == record["finish_reason"]
        names = request.names()
        assert names[:2] == ["submit", "queued"]
        assert names[-2:] == ["detokenize", "finished"]
        assert names.count("first token") == 1
        first = record["num_cached_tokens"]
        for start, count in request.prefilled():
            assert start == first
            first += count
        assert first == record["num_prompt_tokens"]
    roles = lanes_by_role(trace)
    assert ENGINE_PHASES | {"drain", "load model", "receive ADD", "send OUTPUTS"} <= roles["engine"]
    assert {"tokenize", "send ADD", "receive OUTPUTS", "process outputs"} <= roles["front end"]
    kinds = [name for *_, name in trace.arrows]
    assert kinds.count("ADD") == 19
    assert {"HELLO", "INIT", "READY", "OUTPUTS"} <= set(kinds)
    assert trace.about["ring_records_with_one_end"] == 0
    assert trace.about["dropped_records"] == 0
    generated = sum(facts["tokens"] for *_, facts in trace.slices("step"))
    assert generated == sum(r["num_prompt_tokens"] - r["num_cached_tokens"] for r in records) + sum(
        r["num_output_tokens"] - 1 for r in records
    )
    assert b"19 requests" in done.stdout
    assert b"ui.perfetto.dev" in done.stdout


MANY_ENDS = """
import itertools
from shmllm import LLM, RequestError, RequestOutputKind, SamplingParams
llm = LLM("tiny", num_threads=1, kv_cache_memory_bytes=90 * 2**14, max_model_len=256)
greedy = dict(temperature=0, ignore_eos=True)
many = llm.generate([f"x{i} = " for i in range(12)], SamplingParams(max_tokens=150, **greedy))
assert sum(o.metrics.num_preemptions for o in many) > 0
text = many[0].outputs[0].text
(stopped,) = llm.generate("x0 = ", SamplingParams(max_tokens=50, stop=[text[8:11]], **greedy))
assert stopped.outputs[0].finish_reason == "stop"
stream = llm.stream(["a", "b"], SamplingParams(max_tokens=200, output_kind=RequestOutputKind.DELTA))
list(itertools.islice(stream, 3))
stream.close()
llm.generate(["y", "z"], SamplingParams(max_tokens=1, n=2, temperature=1))
llm.close()
"""


def test_preempted_stopped_and_aborted_requests_are_in_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    others = children(os.getpid())
    done = traced(path, sys.executable, "-c", MANY_ENDS)
    assert done.returncode == 0, done.stderr.decode()
    assert children(os.getpid()) == others
    trace = load(path)
    requests = by_number(trace)
    assert sorted(requests) == list(range(12 + 1 + 2 + 4))
    assert all(request.facts["whole"] for request in requests.values())
    reasons = [requests[n].facts["finish reason"] for n in sorted(requests)]
    assert reasons == ["length"] * 12 + ["stop"] + ["abort"] * 2 + ["length"] * 4
    preempted = [r for r in requests.values() if r.facts["preemptions"]]
    assert preempted
    for request in preempted:
        assert request.names().count("preempted") == request.facts["preemptions"]
    assert "ABORT" in {name for *_, name in trace.arrows}


@pytest.mark.parametrize("victim", ["engine", pytest.param("front end", marks=pytest.mark.slow)])
def test_a_killed_process_leaves_a_trace_of_its_steps(tmp_path: Path, victim: str) -> None:
    source = """
import os, signal, sys, threading, time
from shmllm import LLM, SamplingParams
llm = LLM("tiny", num_threads=1, kv_cache_memory_bytes=2**27)
pid = llm.front_end.client.pid if sys.argv[1] == "engine" else os.getpid()
params = SamplingParams(max_tokens=900, ignore_eos=True)
requests = llm.front_end.prepare(["import os"] * 4, params)
begun = set()
for changed in llm.front_end.serve(requests, streaming=True):
    begun.update(id(state) for state in changed if len(state.token_ids) > 20)
    if len(begun) == 4:
        os.kill(pid, signal.SIGKILL)
"""
    path = tmp_path / "trace.json"
    done = traced(path, sys.executable, "-c", source, victim)
    assert done.returncode == (1 if victim == "engine" else 137)
    assert f"exit code {done.returncode}; writing what was recorded".encode() in done.stderr
    trace = load(path)
    requests = by_number(trace)
    assert sorted(requests) == [0, 1, 2, 3]
    assert all("decode" in request.names() for request in requests.values())
    assert len(trace.slices("step")) >= 20
    assert trace.about["exit_code"] == done.returncode
    if victim == "engine":
        assert {r.facts["finish reason"] for r in requests.values()} <= {
            "not in the trace",
            "abort",
        }


def test_the_exit_code_is_the_command_s(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    done = traced(path, sys.executable, "-c", "raise SystemExit(7)")
    assert done.returncode == 7
    assert b"nothing was recorded" in done.stderr
    assert load(path).events == []
    path.write_text("a trace")
    done = traced(path, sys.executable, "-c", "pass")
    assert b"trace.json stays as it was" in done.stderr
    assert path.read_text() == "a trace"


@pytest.mark.slow
def test_sigterm_goes_to_the_command(tmp_path: Path, running: tuple[str, int]) -> None:
    path = tmp_path / "trace.json"
    arguments = ["generate", "--attach", running[0], "x", "--max-tokens", "900", "--ignore-eos"]
    process = subprocess.Popen(
        [sys.executable, "-c", CLI, "trace", "-o", str(path), "--", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(),
        cwd=ELSEWHERE,
    )
    assert read_line(process)  # it answers
    process.terminate()
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143, output.decode()
    assert load(path).about["exit_code"] == 143


@pytest.mark.parametrize(
    "arguments", [[], ["--attach", "x", "--", "generate"], ["-o", "/nowhere/x", "--", "true"]]
)
def test_a_usage_error_is_one_line(arguments: list[str]) -> None:
    done = command("trace", *arguments)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr


def test_an_engine_that_is_not_there(tmp_path: Path) -> None:
    done = command("trace", "--attach", "nobody", "-o", str(tmp_path / "t.json"))
    assert done.returncode == 2
    assert b"engine 'nobody' is not running" in done.stderr


BUSY = """
import sys, time
from shmllm import LLM, SamplingParams
llm = LLM.attach(sys.argv[1])
params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
first = None
while True:
    outputs = llm.generate(["import os", "def f(x):"], params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    first = first or texts
    assert texts == first
    print(time.monotonic(), flush=True)
    time.sleep(0.1)
"""


def await_round(process: subprocess.Popen[bytes]) -> None:
    """Wait until the program has completed a request that it began after this call."""
    now = time.monotonic()
    for _ in range(2):
        while float(read_line(process) or b"inf") < now:
            pass
    assert process.poll() is None


@contextmanager
def busy(name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A front end that generates until the block ends."""
    process = start_source(BUSY, name)
    try:
        await_round(process)
        yield process
    finally:
        kill(process)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    with named_engine(tmp_path_factory.mktemp("engine")) as found:
        yield found


@pytest.fixture
def running(engine: tuple[str, int]) -> Iterator[tuple[str, int]]:
    """Name and pid of the engine of the module."""
    yield engine
    assert_unused(engine[0])
    assert not is_recorded(engine[1])


def has_steps(temporary: Path) -> bool:
    """Whether the recording has steps already."""
    recordings = [r for path in temporary.iterdir() for r in read_all(path)]
    return any(record.type == Type.STEP for r in recordings for record in r.records)


def is_recorded(pid: int) -> bool:
    """Whether a process has a recording open."""
    return ".recording" in Path(f"/proc/{pid}/maps").read_text()


def test_a_busy_engine_and_its_front_ends(tmp_path: Path, running: tuple[str, int]) -> None:
    path = tmp_path / "trace.json"
    name, pid = running
    with busy(name) as one, busy(name) as two:
        began = time.monotonic()
        tracer = start_attached(name, path, 2)
        output, errors = tracer.communicate(timeout=PATIENCE_S)
        took_s = time.monotonic() - began
        assert tracer.returncode == 0, errors.decode()
        trace = load(path)
        names = trace.process_names()
        assert names == {
            pid: f"engine {name}, pid {pid}",
            one.pid: f"front end, pid {one.pid}",
            two.pid: f"front end, pid {two.pid}",
        }
        senders = {(sender, receiver) for sender, _, receiver, _, _ in trace.arrows}
        assert senders >= {(one.pid, pid), (pid, one.pid), (two.pid, pid), (pid, two.pid)}
        whole = [r for r in trace.requests.values() if r.facts["whole"]]
        assert len(whole) >= 4
        for request in whole:
            assert request.facts["output tokens"] == 40
            assert request.facts["finish reason"] == "length"
            assert request.names()[-2:] == ["detokenize", "finished"]
        longest_s = (max(end for lane in trace.lanes.values() for _, end, *_ in lane)) / 1e9
        assert 1 < longest_s < took_s
        assert b"steps" in output
        assert holds_within(lambda: not is_recorded(pid), PATIENCE_S)
        assert holds_within(lambda: not is_recorded(one.pid), PATIENCE_S)
        await_round(one)
        await_round(two)


def test_only_one_trace_at_once_and_ctrl_c_ends_it(
    tmp_path: Path, temporary: Path, running: tuple[str, int]
) -> None:
    path, other = tmp_path / "trace.json", tmp_path / "other.json"
    name, _ = running
    with busy(name) as front_end:
        tracer = start_attached(name, path)
        assert holds_within(lambda: has_steps(temporary), PATIENCE_S)
        second = python("-c", CLI, "trace", "--attach", name, "-o", str(other))
        assert second.returncode == 2
        assert b"is being traced already" in second.stderr
        tracer.send_signal(signal.SIGINT)
        _, errors = tracer.communicate(timeout=PATIENCE_S)
        assert tracer.returncode == 0
        assert b"ended early" in errors
        assert load(path).slices("step")
        await_round(front_end)
        third = python("-c", CLI, "trace", "--attach", name, "--seconds", "2", "-o", str(other))
        assert third.returncode == 0, third.stderr.decode()
        assert load(other).slices("step")


def test_a_killed_tracer_leaves_engine_and_disk_as_they_were(
    tmp_path: Path, temporary: Path, running: tuple[str, int]
) -> None:
    name, pid = running
    with busy(name) as front_end:
        tracer = start_attached(name, tmp_path / "trace.json")
        both = (pid, front_end.pid)
        assert holds_within(lambda: all(map(is_recorded, both)), PATIENCE_S)
        kill(tracer)
        assert holds_within(lambda: not any(map(is_recorded, both)), PATIENCE_S)
        assert holds_within(lambda: not list(temporary.iterdir()), PATIENCE_S)
        await_round(front_end)


@pytest.mark.slow
def test_an_engine_that_dies_while_it_is_traced(tmp_path: Path, temporary: Path) -> None:
    path = tmp_path / "trace.json"
    with named_engine(tmp_path) as (name, pid), busy(name):
        tracer = start_attached(name, path)
        assert holds_within(lambda: has_steps(temporary), PATIENCE_S)
        os.kill(pid, signal.SIGKILL)
        _, errors = tracer.communicate(timeout=PATIENCE_S)
        assert tracer.returncode == 3
        assert b"the engine died; writing what was recorded" in errors
        assert load(path).slices("step")


def test_an_engine_in_the_caller_s_process(tmp_path: Path) -> None:
    source = """
from shmllm import LLM, SamplingParams
with LLM("tiny", multiprocess=False, num_threads=1, kv_cache_memory_bytes=2**27) as llm:
    llm.generate(["import os", "x"], SamplingParams(max_tokens=5, ignore_eos=True))
"""
    done = traced(tmp_path / "trace.json", sys.executable, "-c", source)
    assert done.returncode == 0, done.stderr.decode()
    trace = load(tmp_path / "trace.json")
    assert [r.facts["output tokens"] for r in trace.requests.values()] == [5, 5]
    assert all(r.facts["whole"] for r in trace.requests.values())
    assert len(trace.slices("step")) == 5


def assert_steps_of_rank(trace: Trace, role: str) -> None:
    """The other rank has a lane with each step of the engine, which began there before it ended in
    the engine, and with how long it waited."""
    roles = {name.split(",")[0].split(" test-")[0]: p for p, name in trace.process_names().items()}
    (lane,) = (lane for (pid, _), lane in trace.lanes.items() if pid == roles[role])
    engine = {
        name: end
        for (pid, _), slices in trace.lanes.items()
        for _, end, name, _ in slices
        if pid == roles["engine"] and name.startswith("step ")
    }
    steps = [each for each in lane if each[2].startswith("step ")]
    assert set(engine) <= {name for *_, name, _ in steps}
    waited = 0.0
    for begin, end, name, facts in steps:
        if name in engine:
            assert begin < engine[name]
        assert 0 <= facts["waited for others us"] <= (end - begin) / 1000
        waited += facts["waited for others us"]
    assert waited > 0


RANKED = ("--num-threads", "2", "--kv-cache-memory-bytes", str(2**26))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "role"),
    [
        ("--tensor-parallel-size", "rank 1"),
        pytest.param("--pipeline-parallel-size", "stage 1", marks=pytest.mark.slow),
    ],
)
def test_other_ranks_have_lanes_of_their_own(tmp_path: Path, option: str, role: str) -> None:
    path = tmp_path / "trace.json"
    command = "generate", "x = 1", "--max-tokens", "12", "--ignore-eos", *RANKED, option, "2"
    done = traced(path, "shmllm", *command)
    assert done.returncode == 0, done.stderr.decode()
    trace = load(path)
    assert len(trace.about["processes"]) == 3
    assert_steps_of_rank(trace, role)
    assert f"{role}, pid ".encode() in done.stdout
    assert b"wait for others" in done.stdout


@pytest.mark.slow
def test_ranks_of_a_running_engine_are_in_its_traces(tmp_path: Path) -> None:
    with named_engine(tmp_path, tensor_parallel_size=2, num_threads=2) as (name, _), busy(name):
        for path in (tmp_path / "first.json", tmp_path / "second.json"):
            tracer = start_attached(name, path, 1)
            output, errors = tracer.communicate(timeout=PATIENCE_S)
            assert tracer.returncode == 0, errors.decode()
            assert b"rank 1, pid " in output
            trace = load(path)
            assert trace.about["front_ends_not_recorded"] == []
            assert len(trace.slices("step")) > 20
