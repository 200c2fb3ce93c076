"""Engines for tests: named ones, started with what the test wants changed and ended with the
test, and what tests wait for in any engine."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from conftest import ENGINE_MODULE
from support.programs import ELSEWHERE, PATIENCE_S, environment, holds_within

from shmllm import LLM, AsyncLLM
from shmllm.errors import IpcError
from shmllm.frontend.engine_options import make_engine_config
from shmllm.ipc import registry
from shmllm.ipc.control import ControlView
from shmllm.ipc.layout import EngineState, SegmentKind

_numbers = itertools.count()
_ENGINE = "import sys\n{}\nfrom shmllm.engine.__main__ import main\nsys.exit(main())"


def is_ready(name: str) -> bool:
    """Whether an engine of that name lets front ends in."""
    try:
        control = registry.attach(registry.control_path(name), SegmentKind.CONTROL, name)
    except IpcError:
        return False
    with control:
        view = ControlView(control)
        try:
            return view.engine_state is EngineState.READY
        finally:
            view.close()


@contextmanager
def named_engine(directory: Path, preface: str = "", **options: Any) -> Iterator[tuple[str, int]]:
    """A running engine: its name and pid.

    Args:
        directory: for its log.
        preface: a source text that runs in the engine before it starts.
        options: of the engine, as for `LLM`.
    """
    name = f"test-{os.getpid()}-{next(_numbers)}"
    config = make_engine_config(
        "tiny", kv_cache_memory_bytes=2**27, num_threads=1, **options
    ).to_json()
    log = directory / "engine.log"
    with log.open("wb") as output:
        # The last argument means nothing to the engine; the check for leaks looks for it.
        process = subprocess.Popen(
            [sys.executable, "-c", _ENGINE.format(preface), "--named", name, config, ENGINE_MODULE],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment(),
            cwd=ELSEWHERE,
            start_new_session=True,
        )
    try:
        started = holds_within(lambda: is_ready(name) or process.poll() is not None, PATIENCE_S)
        assert started, log.read_text()
        assert process.poll() is None, log.read_text()
        yield name, process.pid
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        for entry in registry.names():
            if entry.engine == name:
                registry.sweep(entry.path)


def is_idle(llm: LLM | AsyncLLM) -> bool:
    """Whether it has no request and no block in use."""
    metrics = llm.get_metrics()
    return metrics["running"] == metrics["waiting"] == metrics["kv_blocks_used"] == 0


def assert_idle(llm: LLM | AsyncLLM) -> None:
    """What a test leaves in an engine that others use, too, is that test's failure."""
    assert holds_within(lambda: is_idle(llm), PATIENCE_S), llm.get_metrics()
    assert not llm.get_metrics()["asleep"]


def stats_of(name: str) -> dict[str, int]:
    """The statistics page of a named engine, which is not asked for it."""
    with registry.attach(registry.control_path(name), SegmentKind.CONTROL, name) as control:
        view = ControlView(control)
        try:
            return view.stats()
        finally:
            view.close()


def assert_unused(name: str) -> None:
    """As `assert_idle`, of a named engine, which has to be without front ends, too."""

    def is_unused() -> bool:
        stats = stats_of(name)
        taken = {entry.place for entry in registry.names() if entry.engine == name} - {None}
        return not taken and not any(stats[of] for of in ("running", "waiting", "kv_blocks_used"))

    assert holds_within(is_unused, PATIENCE_S), stats_of(name)


def run_a_little(llm: LLM) -> None:
    """Until what was enqueued has a few tokens."""
    before = llm.get_metrics()["generated_tokens"]
    while llm.get_metrics()["generated_tokens"] < before + 5:
        llm._dispatcher.pump(0.05)
