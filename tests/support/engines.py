"""Engines for tests: named ones, started with what the test wants changed and ended with the
test, and what tests wait for in any engine."""

from __future__ import annotations

import itertools
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from conftest import ENGINE_MODULE
from support.waiting import PATIENCE_S, holds_within, wait_until

from shmllm import LLM, AsyncLLM
from shmllm.client.launch import named_engine_command
from shmllm.config import processes
from shmllm.errors import EngineDeadError, IpcError
from shmllm.frontend.options.engine_options import make_engine_config
from shmllm.ipc import registry
from shmllm.ipc.control import ControlView
from shmllm.ipc.states import EngineState, SegmentKind

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
def attached(name: str) -> Iterator[LLM]:
    """A front end of a running engine, which the block must leave idle."""
    with LLM.attach(name) as llm:
        yield llm
    assert_unused(name)


@contextmanager
def named_engine(
    directory: Path, preface: str = "", model: str = "tiny", **options: Any
) -> Iterator[tuple[str, int]]:
    """A running engine: its name and pid.

    Args:
        directory: for its log.
        preface: a source text that runs in the engine before it starts.
        model: its model.
        options: of the engine, as for `LLM`.
    """
    name = f"test-{os.getpid()}-{next(_numbers)}"
    config = make_engine_config(
        model, **({"kv_cache_memory_bytes": 2**27, "num_threads": 1, "dtype": "float32"} | options)
    )
    log = directory / "engine.log"
    command = named_engine_command(name, config)
    if preface:
        # The last argument means nothing to the engine; the check for leaks looks for it.
        command[1:3] = ["-c", _ENGINE.format(preface)]
        command.append(ENGINE_MODULE)
    with log.open("wb") as output:
        process = processes.start(command, output)
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


def tensor_bytes(llm: LLM) -> int:
    """Bytes of the tensors that the engine made since it was ready and still refers to. A named
    engine has to be started with `allow_callables`."""
    found: int = llm.collective_rpc(_tensor_bytes)[0]
    return found


def _tensor_bytes(worker: Any) -> int:
    """Runs in the engine."""
    import gc

    import torch

    gc.collect()
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if isinstance(each, torch.Tensor)
    }
    return sum(storages.values())


def run_a_little(llm: LLM, num_tokens: int = 3) -> None:
    """Until what was enqueued has a few more tokens. It has to have so many left: see
    `slow_steps`."""
    before = llm.get_metrics()["generated_tokens"]
    wait_until(
        lambda: llm.get_metrics()["generated_tokens"] >= before + num_tokens,
        f"{num_tokens} more tokens",
        between=lambda: llm._dispatcher.pump(0.05),
    )


STEP_S = 0.05


@contextmanager
def slow_steps(llm: LLM | AsyncLLM) -> Iterator[None]:
    """Each step of the engine takes STEP_S longer meanwhile.

    For a test that does something to requests while they run: whatever else the machine does, the
    100 steps of a request last longer than the test takes to do it. A named engine has to be
    started with `allow_callables`.
    """
    sync = llm._llm if isinstance(llm, AsyncLLM) else llm
    sync.collective_rpc(_slow_down, args=(STEP_S,))
    try:
        yield
    finally:
        with suppress(EngineDeadError):
            sync.collective_rpc(_slow_down, args=(0.0,))


def _slow_down(worker: Any, step_s: float) -> None:
    """Runs in the engine, and in its other ranks, which wait for the first; 0 ends it."""
    program = getattr(worker.model_runner, "_program", None)
    if program is None:
        return
    vars(program).pop("run", None)
    run = program.run

    def run_slowly(inputs: Any) -> Any:
        time.sleep(step_s)
        return run(inputs)

    if step_s:
        program.run = run_slowly


@contextmanager
def held_steps(llm: LLM, num_steps: int = 4) -> Iterator[Callable[[], None]]:
    """Each engine that runs now computes so many steps more, and waits in the next one.

    For a test that does something to requests while they run: they do not end before, however long
    that takes. An engine of a pool that is started again does not wait.

    Yields:
        Lets the engines go on, which the end of the block does, too.
    """
    with tempfile.NamedTemporaryFile() as gate:
        llm.collective_rpc(_hold, args=(gate.name, num_steps))
        yield gate.close


def _hold(worker: Any, gate: str, num_steps: int) -> None:
    """Runs in the engine."""
    program = worker.model_runner._program
    vars(program).pop("run", None)
    run = program.run

    def run_or_wait(inputs: Any) -> Any:
        nonlocal num_steps
        num_steps -= 1
        if num_steps < 0:
            while os.path.exists(gate):
                time.sleep(0.01)
            vars(program).pop("run", None)
        return run(inputs)

    program.run = run_or_wait
