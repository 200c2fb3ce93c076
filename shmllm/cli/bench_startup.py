"""`shmllm bench startup`: measures the time from starting a process to its first token."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from shmllm.cli.bench_output import (
    BenchOutput,
    describe_machine,
    machine_line,
    output_options,
    progress,
)
from shmllm.cli.interrupts import interruptible, uninterrupted
from shmllm.cli.named import engine_state
from shmllm.cli.options import bench_engine_options, refuse_options, take_engine_options
from shmllm.version import __version__

if TYPE_CHECKING:
    from shmllm.bench.startup import Stages

COUNT = click.IntRange(min=0)
POLL_S = 0.05
STOP_TIMEOUT_S = 60


@click.command()
@click.option(
    "--num-iters-cold",
    type=COUNT,
    default=3,
    show_default=True,
    help="Starts after dropping the files from the page cache.",
)
@click.option(
    "--num-iters-warmup",
    type=COUNT,
    default=1,
    show_default=True,
    help="Starts before the warm ones, not measured.",
)
@click.option(
    "--num-iters-warm",
    type=COUNT,
    default=3,
    show_default=True,
    help="Starts with the files in the page cache.",
)
@click.option(
    "--num-iters-attach",
    type=COUNT,
    default=3,
    show_default=True,
    help="Processes that attach to a running engine.",
)
@output_options
@bench_engine_options
def startup(
    num_iters_cold: int,
    num_iters_warmup: int,
    num_iters_warm: int,
    num_iters_attach: int,
    output: BenchOutput,
    **options: Any,
) -> None:
    """Measure the time from starting a process to its first token, stage by stage.

    Before a cold start the files of the interpreter, the packages and the model are dropped from
    the page cache; pages that other processes have mapped stay there.
    """
    from shmllm.bench.startup import ATTACH_STAGES, START_STAGES, attach, start
    from shmllm.frontend.model_files import resolve_model

    if num_iters_attach:
        why = "is for engines without a name: add --num-iters-attach 0, or leave it out"
        refuse_options(("data_parallel_size", "prefill_engines"), why)
    engine = take_engine_options(options)
    directory = str(resolve_model(engine["model"]))
    total = num_iters_cold + num_iters_warmup + num_iters_warm + num_iters_attach
    runs: dict[str, list[Stages]] = {}
    with interruptible(), progress(total) as begin:

        def repeat(kind: str, times: int, run: Callable[[], Stages]) -> None:
            for _ in range(times):
                begin(kind)
                runs.setdefault(kind, []).append(run())

        repeat("cold", num_iters_cold, lambda: _start_cold(engine, directory))
        repeat("warm-up", num_iters_warmup, lambda: start(engine))
        repeat("warm", num_iters_warm, lambda: start(engine))
        if num_iters_attach:
            with _named_engine(engine) as name:
                repeat("attach", num_iters_attach, lambda: attach(name))
    runs.pop("warm-up", None)
    if not runs:
        raise click.UsageError("all numbers of iterations are 0")
    stages = list(dict.fromkeys((*START_STAGES, *ATTACH_STAGES)))
    _report(runs, stages, engine, output)


def _start_cold(engine: dict[str, Any], directory: str) -> Stages:
    from shmllm.bench.startup import drop_from_page_cache, start

    drop_from_page_cache(directory)
    return start(engine)


@contextlib.contextmanager
def _named_engine(engine: dict[str, Any]) -> Iterator[str]:
    """Runs a named engine inside the `with` block and yields its name."""
    from shmllm.client.launch import named_engine_command
    from shmllm.config.environment import engine_environment
    from shmllm.errors import EngineStartError
    from shmllm.frontend.options.engine_options import make_engine_config
    from shmllm.ipc import registry
    from shmllm.ipc.states import EngineState

    name = f"bench-startup-{os.getpid()}"
    command = named_engine_command(name, make_engine_config(**engine))
    with contextlib.ExitStack() as undo:
        with uninterrupted():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                cwd="/",
                env=engine_environment(),
                start_new_session=True,
            )
            undo.callback(_end, process)
        while engine_state(registry.control_path(name), process.pid) is not EngineState.READY:
            if process.poll() is not None:
                raise EngineStartError(f"the engine ended with exit code {process.returncode}")
            time.sleep(POLL_S)
        yield name


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _report(
    runs: dict[str, list[Stages]], stages: list[str], engine: dict[str, Any], output: BenchOutput
) -> None:
    from shmllm.bench.engine_plot import startup_svg
    from shmllm.bench.report import number, table
    from shmllm.bench.summary import percentiles

    totals = {kind: [sum(each.values()) for each in found] for kind, found in runs.items()}
    summaries: dict[str, dict[str, Any]] = {
        kind: {
            "total_s": percentiles(totals[kind]),
            "stages_s": {stage: percentiles([each[stage] for each in found]) for stage in found[0]},
            "iterations": found,
        }
        for kind, found in runs.items()
    }

    def cell(kind: str) -> Callable[[str], str]:
        found = summaries[kind]
        medians = {stage: values["p50"] for stage, values in found["stages_s"].items()}
        medians["to the first token"] = found["total_s"]["p50"]
        return lambda row: number(medians.get(row))

    rows = [*stages, "to the first token"]
    output.show(table("median, s", rows, {kind: cell(kind) for kind in runs}))
    machine = describe_machine()
    record = {
        "benchmark": "startup",
        "shmllm": __version__,
        "machine": machine,
        "engine": engine,
        # vLLM's benchmark uses these names.
        **{
            f"avg_{kind}_startup_time": found["total_s"]["mean"]
            for kind, found in summaries.items()
        },
        **{f"{kind}_startup_times": times for kind, times in totals.items()},
        "results": summaries,
    }
    bars = [
        (f"{kind}, {index + 1}", {stage: 1e6 * value for stage, value in each.items()})
        for kind, found in runs.items()
        for index, each in enumerate(found)
    ]
    title = "shmllm bench startup"
    subtitle = f"{engine['model']}; {machine_line(machine)}"
    output.write(record, lambda: startup_svg(bars, stages, title, subtitle), title)
