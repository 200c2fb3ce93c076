"""Named engines: several front ends, killed front ends and engines, and error messages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.commands import command
from support.engines import assert_unused, slow_steps
from support.programs import children, environment, is_running, read_line, start_source
from support.programs import kill as end
from support.variants import slow
from support.waiting import PATIENCE_S, holds_within, wait_until

from shmllm import LLM, EngineDeadError, EngineStartError, SamplingParams, SegmentError
from shmllm.client import channel_client
from shmllm.ipc import registry
from shmllm.ipc.layout import NUM_CLIENTS
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import SegmentKind

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

CLI = [sys.executable, "-c", "from shmllm.cli.main import main; main()"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
OPTIONS = ("--kv-cache-memory-bytes", str(2**27), "--num-threads", "1", "--allow-callables")
LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = command(*arguments)
    texts = done.stdout.decode(), done.stderr.decode()
    return subprocess.CompletedProcess(done.args, done.returncode, *texts)


def start(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `shmllm engine start --detach` in a process of its own, which the engine outlives."""
    return subprocess.run(
        [*CLI, "engine", "start", name, "--detach", *options],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        stdin=subprocess.DEVNULL,
        env=environment(),
        cwd="/",
    )


def engine_record(name: str) -> dict[str, Any]:
    records = json.loads(run("engine", "ls", "--json").stdout)
    return next(record for record in records if record["name"] == name)


def num_clients(name: str) -> int:
    return len(engine_record(name)["clients"])


@pytest.fixture
def running(engine: str) -> Iterator[str]:
    """The engine of the module, which the test must leave unused."""
    yield engine
    assert_unused(engine)


@pytest.fixture
def name(tmp_path: Path) -> Iterator[str]:
    """An engine of the test's own, which is stopped afterwards."""
    name = f"test-{os.getpid()}-{time.monotonic_ns() % 10**6}"
    log = tmp_path / "engine.log"
    started = start(name, "--log", str(log), *OPTIONS)
    assert started.returncode == 0, started.stderr + log.read_text()
    pid = int(engine_record(name)["pid"])
    yield name
    if registry.control_path(name).exists():
        run("engine", "stop", name)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for entry in registry.names():
        if entry.engine == name:
            wait_until(lambda path=entry.path: registry.sweep(path), "swept")  # type: ignore[misc]


def tokens(llm: LLM, text: str = "import os\n") -> list[int]:
    return llm.generate(text, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


DEATHS = {(signal.SIGKILL, "busy"), (signal.SIGTERM, "idle")}
"""Those of front ends that are tried by default."""
ATTACH_AND_HANG = """
import sys, time
from shmllm import LLM, SamplingParams
llm = LLM.attach(sys.argv[1])
print("attached", flush=True)
if sys.argv[2] == "busy":
    llm.generate(["x"] * 8, SamplingParams(max_tokens=900, ignore_eos=True), use_tqdm=False)
time.sleep(60)
"""
FLOOD = """
import sys
from shmllm import LLM, SamplingParams
llm = LLM.attach(sys.argv[1])
llm.generate(["x"] * 5000, SamplingParams(max_tokens=64, ignore_eos=True), use_tqdm=False)
"""


def start_client(name: str, mode: str) -> subprocess.Popen[Any]:
    client = start_source(ATTACH_AND_HANG, name, mode, text=True)
    assert read_line(client) == "attached\n"
    return client


def kill(client: subprocess.Popen[Any], number: int = signal.SIGKILL) -> None:
    client.send_signal(number)
    client.wait(PATIENCE_S)
    assert client.stdout is not None
    client.stdout.close()


def test_front_ends_come_and_go_while_the_engine_stays(running: str) -> None:
    with LLM.attach(running) as first, LLM.attach(running) as second:
        assert tokens(first) == tokens(second)
        assert num_clients(running) == 2
        assert engine_record(running)["device"] == "cpu"
    wait_until(lambda: num_clients(running) == 0, "the engine is without clients")
    with LLM.attach(running) as third:
        assert len(tokens(third)) == 8


def test_a_front_end_has_options_of_its_own(running: str) -> None:
    options = {
        "override_generation_config": {"temperature": 0.0, "max_new_tokens": 3},
        "chat_template": "{{ messages[0].content }}",
        "stream_interval": None,
    }
    with LLM.attach(running, **options) as own, LLM.attach(running) as other:
        (output,) = own.generate("import os", use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3
        (reply,) = own.chat([{"role": "user", "content": "import os"}], use_tqdm=False)
        assert reply.prompt == "import os"
        assert reply.outputs[0].token_ids == output.outputs[0].token_ids
        assert other.get_default_sampling_params().max_tokens != 3
    with pytest.raises(TypeError, match="'dtype', an option for starting an engine"):
        LLM.attach(running, dtype="float32")
    with pytest.raises(TypeError, match="the nearest option is 'tool_parser'"):
        LLM.attach(running, tool_parse="auto")
    with pytest.raises(EngineStartError, match="stream_interval"):
        LLM.attach(running, stream_interval=0)
    with pytest.raises(EngineStartError, match="default_mm_loras"):
        LLM.attach(running, default_mm_loras={"audio": "nowhere"})
    wait_until(lambda: num_clients(running) == 0, "the engine is without clients")


def test_the_command_line_attaches(running: str) -> None:
    result = run("generate", "--attach", running, "--max-tokens", "4", "import os")
    assert result.returncode == 0
    assert result.stdout
    refused = run("generate", "--attach", running, "--dtype", "float32", "import os")
    assert refused.returncode == 2
    assert "--dtype is for starting an engine" in refused.stderr


def test_thirty_two_front_ends_attach_and_another_is_refused(running: str) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(LLM.attach(running)) for _ in range(NUM_CLIENTS)]
        assert len({tuple(tokens(client)) for client in clients}) == 1
        with pytest.raises(SegmentError, match=f"has {NUM_CLIENTS} clients"):
            LLM.attach(running)
    wait_until(lambda: num_clients(running) == 0, "the engine is without clients")


@pytest.mark.parametrize(
    ("number", "mode"),
    [
        pytest.param(number, mode, marks=() if (number, mode) in DEATHS else pytest.mark.slow)
        for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)
        for mode in ("idle", "busy")
    ],
)
def test_a_dead_front_end_leaves_nothing_and_disturbs_no_other(
    running: str, mode: str, number: int
) -> None:
    with LLM.attach(running) as other:
        expected = tokens(other)
        client = start_client(running, mode)
        if mode == "busy":
            wait_until(lambda: other.get_metrics()["running"] > 0, "the client's requests run")
        kill(client, number)
        segment = registry.client_path(running, 1)
        wait_until(lambda: not segment.exists(), "its segment is removed")
        wait_until(lambda: other.get_metrics()["running"] == 0, "its requests end")
        assert tokens(other) == expected


def test_a_flood_does_not_hold_up_another_front_end(running: str) -> None:
    flood = start_source(FLOOD, running, stderr=subprocess.DEVNULL)
    try:
        with LLM.attach(running) as llm:
            wait_until(lambda: llm.get_metrics()["waiting"] > 1000, "the flood is there")
            assert len(tokens(llm)) == 8
            assert llm.get_metrics()["waiting"] > 500, "it was served before the flood was over"
    finally:
        end(flood)


def test_a_killed_engine_is_reported_and_can_be_started_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM.attach(name) as llm:
        os.kill(int(engine_record(name)["pid"]), signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="died"):
            llm.generate("x", LONG, use_tqdm=False)
    with pytest.raises(SegmentError, match="is dead"):
        LLM.attach(name)
    assert engine_record(name)["state"] == "dead"
    assert f"would remove {registry.control_path(name)}" in run("ipc", "gc").stdout
    assert registry.control_path(name).exists()
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for its log
    assert start(name).returncode == 0
    with LLM.attach(name) as llm:
        assert len(tokens(llm)) == 8


def test_gc_removes_only_the_dead(running: str) -> None:
    dead = registry.control_path(f"{running}-dead")
    with Segment.create(SegmentKind.CONTROL) as segment:
        segment.take_ownership()
        assert registry.publish(segment, dead)
    assert f"removed {dead}" in run("ipc", "gc", "--yes").stdout
    assert not dead.exists()
    assert registry.control_path(running).exists()


def test_a_second_engine_of_that_name_is_refused(
    running: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for its log
    result = start(running)
    assert result.returncode == 2
    assert f"engine {running!r} is already running" in result.stderr


def test_in_the_foreground_the_model_is_named_and_a_line_says_when_it_is_ready() -> None:
    name = f"test-{os.getpid()}-front"
    process = subprocess.Popen(
        [*CLI, "engine", "start", name, *OPTIONS],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(),
        text=True,
    )
    try:
        assert read_line(process) == f"starting engine {name!r} with tiny; Ctrl-C ends it\n"
        assert f"the engine is ready on cpu, pid {process.pid}" in read_line(process)
        with LLM.attach(name) as llm:
            assert llm.health() == "ready"
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
    finally:
        end(process)
        registry.sweep(registry.control_path(name))


@pytest.mark.parametrize("is_stuck", [True, slow(False)])
def test_an_interrupted_start_leaves_no_engine(is_stuck: bool) -> None:
    process = subprocess.Popen(
        [*CLI, "engine", "start", "interrupted", "--detach", *OPTIONS],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment(),
        text=True,
    )
    try:
        assert holds_within(lambda: bool(children(process.pid)), PATIENCE_S)
        (engine,) = children(process.pid)
        if is_stuck:
            path = registry.control_path("interrupted")
            assert holds_within(path.exists, PATIENCE_S)
            os.kill(engine, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130
        assert message.strip() == "interrupted"
        assert holds_within(lambda: not is_running(engine), PATIENCE_S)
    finally:
        end(process)


def test_a_call_waits_as_long_as_the_engine_lives(
    running: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour passes for the front end while the engine is stopped for a moment."""
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() * 10_000)
    monkeypatch.setattr(channel_client, "time", clock)
    with LLM.attach(running) as llm:
        pid = llm._client.pid
        continued = threading.Timer(0.4, os.kill, (pid, signal.SIGCONT))
        os.kill(pid, signal.SIGSTOP)
        continued.start()
        try:
            assert llm.reset_prefix_cache() in (True, False)
        finally:
            continued.join()


def test_stop_aborts_what_runs(name: str) -> None:
    with LLM.attach(name) as llm:
        requests = llm.front_end.prepare(["x"] * 4, LONG)
        finished = []
        is_stopped = False
        with slow_steps(llm):
            for changed in llm.front_end.serve(requests):
                if not is_stopped and llm.get_metrics()["generated_tokens"] > 20:
                    is_stopped = run("engine", "stop", name).returncode == 0
                finished += [state for state in changed if state.finish_reason]
        assert {state.finish_reason for state in finished} == {"abort"}
    assert not registry.control_path(name).exists()


def test_stop_can_drain(name: str) -> None:
    with LLM.attach(name) as llm:
        requests = llm.front_end.prepare(["x"] * 4, SamplingParams(max_tokens=300, ignore_eos=True))
        stopper = None
        finished = []
        for changed in llm.front_end.serve(requests):
            if stopper is None:
                stopper = subprocess.Popen([*CLI, "engine", "stop", name, "--drain", "60"])
            finished += [state for state in changed if state.finish_reason]
        assert stopper is not None
        assert [len(state.token_ids) for state in finished] == [300] * 4
        assert stopper.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT]
)
def test_a_signal_ends_the_engine_and_its_name(name: str, number: int) -> None:
    os.kill(int(engine_record(name)["pid"]), number)
    wait_until(lambda: not registry.control_path(name).exists(), "its name is free")


def test_attaching_to_nothing_or_to_nonsense_says_so() -> None:
    with pytest.raises(SegmentError, match="'nobody' is not running"):
        LLM.attach("nobody")
    with pytest.raises(SegmentError, match="1 to 64 letters"):
        LLM.attach("../etc")


def test_attaching_while_it_starts_says_so() -> None:
    name = f"starting-{os.getpid()}"
    path = registry.control_path(name)
    with Segment.create(SegmentKind.CONTROL) as segment:
        segment.take_ownership()
        assert registry.publish(segment, path)
        with pytest.raises(SegmentError, match="still starting"):
            LLM.attach(name)
        registry.withdraw(segment, path)


def test_a_failed_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    result = start("broken", "--log", str(log), "-m", str(tmp_path))
    assert result.returncode == 2
    assert "config.json" in result.stderr
    assert not registry.control_path("broken").exists()


def test_garbage_in_its_ring_cuts_off_that_front_end_only(running: str) -> None:
    with LLM.attach(running) as other, LLM.attach(running) as bad:
        expected = tokens(other)
        bad._client._channel.try_send(4711, b"nonsense")  # type: ignore[attr-defined]
        with pytest.raises(EngineDeadError, match="sent invalid messages"):
            bad.generate("x", LONG, use_tqdm=False)
        assert tokens(other) == expected


def test_inspect_shows_state_and_records(running: str) -> None:
    shown = run("ipc", "inspect", running).stdout
    assert "state: READY" in shown
    client = start_client(running, "idle")
    try:
        shown = run("ipc", "inspect", f"{running}.0").stdout
        assert "requests unread: 0 of 524288 bytes" in shown
        assert "position 0: READY" in shown
        assert "bytes, read" in shown, "what was read is still there to be seen"
        assert "outputs writer: messages" in shown
        assert f"{running}.0" in run("ipc", "ls").stdout
    finally:
        kill(client)
