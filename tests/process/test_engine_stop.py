"""`shmllm engine stop` ends an engine whatever that does, and nothing else ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from conftest import ENGINE_MODULE
from support.commands import command
from support.engines import named_engine
from support.programs import ELSEWHERE, environment, is_running, kill
from support.waiting import PATIENCE_S, wait_until

from shmllm import LLM, EngineDeadError, SamplingParams, SegmentError
from shmllm.client import attached
from shmllm.client.attached import AttachedEngineClient
from shmllm.frontend.options.engine_options import make_engine_config
from shmllm.ipc import layout, registry
from shmllm.ipc.control import ControlPage
from shmllm.ipc.layout import NUM_CLIENTS
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import Answer, EngineState, SegmentKind
from shmllm.ipc.words import Word
from shmllm.wire.messages import Method

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

CLI = "from shmllm.cli.main import main; main()"
ENGINE = "{}\nimport sys\nfrom shmllm.engine.__main__ import main\nsys.exit(main())"
HANGS_WHILE_LOADING = """
import time
from shmllm.engine.process import EngineProcess
EngineProcess._load = lambda *_: time.sleep(600)
"""


def stop(name: str, *options: str) -> tuple[int, str]:
    """The exit code of `shmllm engine stop`, and what it says."""
    done = command("engine", "stop", name, *options)
    assert not done.stdout
    return done.returncode, done.stderr.decode()


def names_of(engine: str) -> list[Path]:
    return [entry.path for entry in registry.names() if entry.engine == engine]


@contextmanager
def starting_engine(preface: str = "") -> Iterator[tuple[str, int]]:
    """The name and pid of an engine that has a name and is not ready yet."""
    name = f"starting-{os.getpid()}"
    config = make_engine_config("tiny", kv_cache_memory_bytes=2**26, num_threads=1).to_json()
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE.format(preface), "--named", name, config, ENGINE_MODULE],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
        cwd=ELSEWHERE,
        start_new_session=True,
    )
    try:
        wait_until(registry.control_path(name).exists, "the engine has a name")
        yield name, process.pid
    finally:
        kill(process)
        for path in names_of(name):
            registry.sweep(path)


def front_end(stack: ExitStack, name: str) -> AttachedEngineClient:
    client = AttachedEngineClient(name)
    stack.callback(client.close)
    client.wait_ready()
    return client


def test_an_engine_that_does_not_react_is_killed(tmp_path: Path) -> None:
    """Also an engine in the middle of a long step reacts to nothing."""
    with named_engine(tmp_path) as (name, pid), ExitStack() as stack:
        client = front_end(stack, name)
        os.kill(pid, signal.SIGSTOP)
        code, text = stop(name, "--drain", "0.2", "--timeout", "0.3")
        assert (code, text) == (0, f"engine '{name}' did not end in 0.5 s and was killed\n")
        assert not is_running(pid)
        assert not registry.control_path(name).exists()
        with pytest.raises(EngineDeadError, match="was stopped by `shmllm engine stop`"):
            client.call(Method.RESET_PREFIX_CACHE)


def test_an_engine_without_a_free_place_ends_by_itself(tmp_path: Path) -> None:
    with named_engine(tmp_path) as (name, pid), ExitStack() as stack:
        clients = [front_end(stack, name) for _ in range(NUM_CLIENTS)]
        assert stop(name) == (0, "")
        assert not is_running(pid)
        with pytest.raises(EngineDeadError, match="was stopped by `shmllm engine stop`"):
            clients[-1].call(Method.RESET_PREFIX_CACHE)
    assert names_of(name) == []


def test_a_later_stop_shortens_the_drain(tmp_path: Path) -> None:
    with named_engine(tmp_path) as (name, pid), LLM.attach(name) as llm:
        llm.pause_generation("keep")
        llm.enqueue("x", SamplingParams(max_tokens=900, ignore_eos=True))
        first = subprocess.Popen(
            [sys.executable, "-c", CLI, "engine", "stop", name, "--drain", "600"],
            env=environment(),
            cwd=ELSEWHERE,
        )
        try:
            view = llm._client._view  # type: ignore[attr-defined]
            wait_until(lambda: view.is_stop_requested, "the first stop asks")
            assert is_running(pid)
            assert stop(name) == (0, "")
            assert first.wait(PATIENCE_S) == 0
        finally:
            kill(first)


def test_an_engine_that_hangs_while_it_loads_is_killed() -> None:
    with starting_engine(HANGS_WHILE_LOADING) as (name, pid):
        code, text = stop(name, "--timeout", "0.5")
        assert (code, text) == (0, f"engine '{name}' did not end in 0.5 s and was killed\n")
        assert not is_running(pid)
        assert names_of(name) == []


def test_an_engine_that_loads_ends_before_it_is_ready() -> None:
    with starting_engine() as (name, pid):
        assert stop(name, "--timeout", str(PATIENCE_S)) == (0, "")
        assert not is_running(pid)
        assert names_of(name) == []


def test_a_front_end_that_asks_while_the_engine_starts_waits_until_it_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attached, "_check_ready", lambda *_: None)
    with starting_engine() as (name, pid):
        client = AttachedEngineClient(name)
        view = client._view
        assert view.engine_state is EngineState.STARTING
        client._channel.say_hello(client._place, client._nonce)
        wait_until(
            lambda: not is_running(pid) or view.answer(0, client._nonce) is Answer.ACCEPTED,
            "the engine answers",
        )
        assert view.engine_state is EngineState.READY
        client.wait_ready()
        client.close()


@contextmanager
def named_segment(name: str) -> Iterator[Segment]:
    """A named segment, as an engine in this process would have it."""
    path = registry.control_path(name)
    with Segment.create(SegmentKind.CONTROL) as segment:
        segment.take_ownership()
        page = ControlPage(segment)
        assert registry.publish(segment, path)
        try:
            yield segment
        finally:
            page.close()
            path.unlink(missing_ok=True)


def test_what_cannot_be_stopped_is_one_error() -> None:
    name = f"other-{os.getpid()}"
    code, text = stop(name)
    assert (code, text.count("\n")) == (2, 1)
    assert f"engine '{name}' is not running" in text
    with named_segment(name) as segment:
        segment._drop_owner_fd()
        code, text = stop(name)
        assert (code, text.count("\n")) == (2, 1)
        assert f"engine '{name}' is dead" in text
    with named_segment(name) as segment:
        Word(segment.buffer, layout.VERSION_OFFSET).store(layout.PROTOCOL_VERSION - 1)
        code, text = stop(name)
        assert (code, text.count("\n")) == (2, 1)
        assert f"speaks version {layout.PROTOCOL_VERSION - 1}" in text


def test_an_engine_in_another_pid_namespace_is_asked_but_not_killed() -> None:
    name = f"far-{os.getpid()}"
    with named_segment(name) as segment:
        Word(segment.buffer, layout.CONTROL_ENGINE_PID_NS_OFFSET).store(1)
        code, text = stop(name, "--timeout", "0.3")
        assert code == 1
        assert "another pid namespace" in text
        assert f"as pid {os.getpid()} there" in text
        assert Word(segment.buffer, layout.CONTROL_STOP_OFFSET).load() == 1
        assert registry.control_path(name).exists()


def test_a_live_engine_is_not_attached_to_while_it_is_being_stopped() -> None:
    name = f"ending-{os.getpid()}"
    with named_segment(name) as segment:
        Word(segment.buffer, layout.CONTROL_STATE_OFFSET).store(EngineState.READY)
        Word(segment.buffer, layout.CONTROL_STOP_OFFSET).store(5000)
        with pytest.raises(SegmentError, match="is being stopped"):
            LLM.attach(name)
