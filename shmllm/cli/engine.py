"""`shmllm engine`: starts, lists and stops named engines, which several front ends can use."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import click

from shmllm.cli.engine_sleep import sleep, wake
from shmllm.cli.interrupts import interruptible, uninterrupted
from shmllm.cli.listing import print_records, size
from shmllm.cli.metrics import check_metrics_port, metrics_command
from shmllm.cli.named import engine_state
from shmllm.cli.options import (
    ITEM_OPTIONS,
    Status,
    engine_options,
    metrics_port_option,
    named_engine_options,
    refuse_options,
    take_engine_options,
)

POLL_S = 0.05
WIDE = 110
"""The columns of a terminal in which `ls` shows the precision, too."""
ENDING_S = 1.0
"""The time for an engine to end by itself; an interrupted command waits 1.5 s in all."""


@click.group()
def engine() -> None:
    """Start, list, stop and suspend named engines, which outlive their front ends."""
    from shmllm.sigbus import bus_guard

    bus_guard.install()


engine.add_command(sleep)
engine.add_command(wake)


@engine.command()
@click.argument("name")
@click.option(
    "--detach", is_flag=True, help="Run in the background; return when the engine is ready."
)
@click.option(
    "--log",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Log file of a detached engine.  [default: shmllm-UID/NAME.log in the temporary "
    "directory]",
)
@click.option(
    "--startup-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds to wait until a detached engine is ready.",
)
@metrics_port_option
@named_engine_options
@engine_options
def start(
    name: str,
    detach: bool,
    log: Path | None,
    startup_timeout: float,
    metrics_port: int | None,
    **options: Any,
) -> int:
    """Start an engine called NAME, which runs until `shmllm engine stop NAME` or Ctrl-C.

    \b
    shmllm engine start main -m ./my-model --detach
    shmllm generate --attach main "def fibonacci(n):"
    """
    from shmllm.cli.engine_log import open_log
    from shmllm.client.launch import named_engine_command
    from shmllm.config import processes
    from shmllm.config.environment import engine_environment
    from shmllm.frontend.options.engine_options import make_engine_config
    from shmllm.ipc import registry

    check_metrics_port(metrics_port)
    registry.control_path(name)  # refuses an invalid name before anything uses it
    refuse_options(ITEM_OPTIONS, f"is for commands that send prompts, also with --attach {name}")
    config = make_engine_config(**take_engine_options(options))
    config.shared_kv.check_role()
    command = named_engine_command(name, config)
    if not detach:
        click.echo(
            f"starting engine {name!r} with {config.load.model_name}; Ctrl-C ends it", err=True
        )
        os.chdir("/")
        _show_metrics(name, os.getpid(), metrics_port, None)
        os.execve(command[0], command, engine_environment())
    target, output = (log, open(log, "ab")) if log else open_log(name)  # noqa: SIM115
    with interruptible(), contextlib.ExitStack() as unless_ready:
        with output as file, uninterrupted():
            process = processes.start(command, file)
            unless_ready.callback(_end, process, name)
            _show_metrics(name, process.pid, metrics_port, file)
        model = config.load.model_name
        code = _wait_until_ready(name, model, process, target, startup_timeout)
        if code == 0:
            unless_ready.pop_all()
        return code


@engine.command("ls")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_engines(as_json: bool) -> None:
    """List named engines with their model, state, device, precision, who drafts tokens, clients,
    requests, KV cache usage and the size of the KV cache that they share.

    The JSON records are those of `shmllm top --json`, without the figures of an interval.
    """
    from shmllm.monitor.find import named_engines
    from shmllm.monitor.record import record_of

    records = [record_of(engine) for engine in named_engines()]
    if as_json:
        click.echo(json.dumps(records, indent=2))
        return
    if not records:
        click.echo("no named engine; start one with: shmllm engine start NAME", err=True)
        return
    rows = [_row(record) for record in records]
    columns = list(rows[0])
    if sys.stdout.isatty() and shutil.get_terminal_size().columns < WIDE:
        columns.remove("precision")
    for optional in ("drafts", "shared KV"):
        if not any(row[optional] for row in rows):
            columns.remove(optional)
    texts = ("name", "model", "state", "device", "precision", "drafts")
    print_records(columns, rows, shrinking=[name for name in texts if name in columns])


@engine.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def errors(name: str, as_json: bool) -> None:
    """List the distinct errors that the engine called NAME has recorded, the latest one last.

    These are errors that do not end the engine: front ends that it cut off or refused, failed calls
    and weight updates, outputs that found no room. Errors whose texts differ in numbers only are
    counted as one. The engine may be dead, as long as its segment exists.
    """
    from contextlib import closing
    from dataclasses import asdict

    from shmllm.cli.ipc import local_time
    from shmllm.errors import SegmentError
    from shmllm.ipc import registry
    from shmllm.ipc.control import ControlView
    from shmllm.ipc.states import SegmentKind
    from shmllm.monitor.find import open_segment

    path = registry.control_path(name)
    if not path.exists():
        raise SegmentError(f"no engine {name!r} runs or has died here; see: shmllm engine ls")
    with (
        open_segment(path, SegmentKind.CONTROL) as control,
        closing(ControlView(control)) as view,
    ):
        found = view.errors()
    if as_json:
        click.echo(json.dumps([asdict(error) for error in found], indent=2))
    elif found:
        rows = [
            {
                "last": local_time(error.last_ns),
                "first": local_time(error.first_ns),
                "count": error.count,
                "text": error.text,
            }
            for error in found
        ]
        print_records(("last", "first", "count", "text"), rows)
    else:
        click.echo(f"engine {name!r} has recorded no error", err=True)


@engine.command()
@click.argument("name")
@click.option(
    "--drain",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Let running requests finish for at most SECONDS.  [default: 0, which aborts them]",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Kill the engine if it has not ended SECONDS after --drain.",
)
def stop(name: str, drain: float, timeout: float) -> int:
    """Stop the engine called NAME, whatever it does.

    An engine that loads a model or computes a long step ends after that. One that does not end in
    time is killed.
    """
    from shmllm.client.stopping import StopResult, stop_engine

    status = Status()
    try:
        result, pid = stop_engine(
            name,
            drain,
            timeout,
            lambda left_s: status.show(
                f"stopping engine {name!r}; it is killed in {math.ceil(left_s)} s"
            ),
        )
    finally:
        status.clear()
    waited = f"did not end in {drain + timeout:g} s"
    match result:
        case StopResult.KILLED:
            click.echo(f"engine {name!r} {waited} and was killed", err=True)
        case StopResult.UNREACHABLE:
            click.echo(
                f"shmllm: engine {name!r} {waited}. It runs in another pid namespace, perhaps in "
                f"another container, as pid {pid} there: kill it from there",
                err=True,
            )
        case StopResult.UNKILLABLE:
            click.echo(
                f"shmllm: engine {name!r} {waited}. Process {pid} was killed, but hangs in the "
                "kernel: look for a broken device or driver (dmesg)",
                err=True,
            )
    return 0 if result in (StopResult.ENDED, StopResult.KILLED) else 1


def _show_metrics(name: str, pid: int, port: int | None, output: IO[bytes] | None) -> None:
    """Starts the process that serves the engine's statistics; it ends with the engine."""
    from shmllm.config import processes

    if port is not None:
        helper = processes.start(metrics_command(name, pid, port), output or 2)
        helper.returncode = 0  # avoids Popen's warning: that process outlives this one


def _wait_until_ready(
    name: str, model: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float
) -> int:
    from shmllm.ipc import registry
    from shmllm.ipc.states import EngineState

    status = Status()
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        code = process.poll()
        if code is not None:
            status.clear()
            lines = log.read_text(errors="replace").strip().splitlines()
            click.echo(lines[-1] if lines else f"shmllm: exit code {code}", err=True)
            return 2
        state = engine_state(registry.control_path(name), process.pid)
        if state is EngineState.READY:
            status.clear()
            click.echo(
                f"engine {name!r} is ready with {model}: pid {process.pid}, log {log}", err=True
            )
            process.returncode = 0  # avoids Popen's warning: that process outlives this one
            return 0
        status.show(f"starting engine {name!r} with {model}")
        time.sleep(POLL_S)
    status.clear()
    click.echo(f"shmllm: engine {name!r} was not ready after {timeout_s:g} s; see {log}", err=True)
    return 2


def _end(process: subprocess.Popen[bytes], name: str) -> None:
    """Ends an engine that is not ready, and removes its segment if it does not do that in time."""
    from shmllm.ipc import registry

    process.terminate()
    try:
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    registry.sweep(registry.control_path(name))


def _row(record: dict[str, Any]) -> dict[str, Any]:
    """A line of `ls` about an engine, from its record."""
    used = record["kv_used"]
    return {
        "name": record["name"],
        "model": record["model"],
        "state": record["state"],
        "device": record["device"],
        "precision": record["precision"],
        "drafts": record["speculation"],
        "clients": _clients(record["clients"]),
        "run": record["running"],
        "wait": record["waiting"],
        "KV": None if used is None else f"{100 * used:.0f}%",
        "shared KV": size(shared) if (shared := record["shared_kv_cache_bytes"]) else None,
        "tokens": record["generated_tokens"],
    }


def _clients(clients: Sequence[Mapping[str, Any]]) -> str:
    """The number of front ends, and of those that are neither idle nor active."""
    kinds = [client["state"].split()[0] for client in clients]
    ill = [f"{kinds.count(kind)} {kind}" for kind in ("hung", "stopped", "dead") if kind in kinds]
    return f"{len(clients)} ({', '.join(ill)})" if ill else str(len(clients))
