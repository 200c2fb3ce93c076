"""`shmllm engine`: starts, lists and stops named engines, which several front ends can use."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from shmllm.cli.engine_sleep import sleep, wake
from shmllm.cli.listing import print_records
from shmllm.cli.metrics import check_metrics_port, metrics_command
from shmllm.cli.named import engine_state
from shmllm.cli.options import (
    Status,
    engine_options,
    metrics_port_option,
    named_engine_options,
    take_engine_options,
)

if TYPE_CHECKING:
    from shmllm.ipc.control import ControlView

POLL_S = 0.05


@click.group()
def engine() -> None:
    """Start, list, stop and suspend named engines, which outlive their front ends."""
    from shmllm.ipc import bus_guard

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
    from shmllm.client.launch import engine_environment, named_engine_command
    from shmllm.frontend.engine_options import make_engine_config
    from shmllm.ipc import registry

    check_metrics_port(metrics_port)
    registry.control_path(name)  # refuses an invalid name before anything uses it
    config = make_engine_config(**take_engine_options(options))
    command = named_engine_command(name, config)
    if not detach:
        click.echo(f"engine {name!r} runs in the foreground; Ctrl-C ends it", err=True)
        os.chdir("/")
        _show_metrics(name, os.getpid(), metrics_port, None)
        os.execve(command[0], command, engine_environment())
    target, output = (log, open(log, "ab")) if log else open_log(name)  # noqa: SIM115
    with output as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd="/",
            env=engine_environment(),
            start_new_session=True,
        )
        _show_metrics(name, process.pid, metrics_port, file)
    return _wait_until_ready(name, process, target, startup_timeout)


@engine.command("ls")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_engines(as_json: bool) -> None:
    """List named engines with their state, device, clients, requests and KV cache usage."""
    records = list(_describe_all())
    if as_json:
        click.echo(json.dumps(records, indent=2))
        return
    if not records:
        click.echo("no named engine; start one with: shmllm engine start NAME", err=True)
        return
    columns = (
        *("name", "pid", "state", "device", "clients"),
        *("running", "waiting", "kv_used", "tokens"),
    )
    print_records(columns, [r | {"clients": _clients(r)} for r in records])


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
    from shmllm.ipc.layout import SegmentKind
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
    from shmllm.client.launch import engine_environment

    if port is not None:
        helper = subprocess.Popen(
            metrics_command(name, pid, port),
            stdin=subprocess.DEVNULL,
            stdout=output or sys.stderr,
            stderr=output,
            cwd="/",
            env=engine_environment(),
            start_new_session=True,
        )
        helper.returncode = 0  # avoids Popen's warning: that process outlives this one


def _wait_until_ready(
    name: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float
) -> int:
    from shmllm.ipc import registry
    from shmllm.ipc.layout import EngineState

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
            click.echo(f"engine {name!r} is ready: pid {process.pid}, log {log}", err=True)
            process.returncode = 0  # avoids Popen's warning: that process outlives this one
            return 0
        status.show(f"starting engine {name!r}")
        time.sleep(POLL_S)
    process.kill()
    process.wait()
    status.clear()
    click.echo(f"shmllm: engine {name!r} was not ready after {timeout_s:g} s; see {log}", err=True)
    return 2


def _describe_all() -> Iterator[dict[str, Any]]:
    from shmllm.errors import IpcError
    from shmllm.ipc import registry
    from shmllm.ipc.control import ControlView
    from shmllm.ipc.layout import SegmentKind

    named = registry.names()
    for entry in named:
        if entry.place is not None:
            continue
        places = [e for e in named if e.engine == entry.engine and e.place is not None]
        try:
            with registry.attach(entry.path, SegmentKind.CONTROL, "it") as control:
                view = ControlView(control)
                record = _describe(view)
                view.close()
        except IpcError as error:
            record = {"state": "dead" if "is dead" in str(error) else str(error)}
        states = [_state_of(place.path) for place in places]
        yield {"name": entry.engine, "clients": len(places), "client_states": states, **record}


def _state_of(client: Path) -> str:
    """The state of the front end whose segment is at this path."""
    from shmllm.errors import IpcError
    from shmllm.ipc import registry
    from shmllm.ipc.client_state import client_state
    from shmllm.ipc.layout import SegmentKind

    try:
        with registry.attach(client, SegmentKind.CLIENT, "it") as segment:
            return client_state(segment)
    except IpcError:
        return "dead"


def _clients(record: dict[str, Any]) -> str:
    """The number of front ends, and of those that are neither idle nor active."""
    kinds = [state.split()[0] for state in record["client_states"]]
    ill = [f"{kinds.count(kind)} {kind}" for kind in ("hung", "stopped", "dead") if kind in kinds]
    return f"{record['clients']} ({', '.join(ill)})" if ill else str(record["clients"])


def _describe(view: ControlView) -> dict[str, Any]:
    from shmllm.ipc.stats import Stat
    from shmllm.outputs.sleep_report import SleepState

    asleep = SleepState(view.stat(Stat.ASLEEP))
    state = view.describe()
    if state == "ready" and asleep:
        state = "asleep" if asleep.tags else "weights missing"
    used, total = view.stat(Stat.KV_BLOCKS_USED), view.stat(Stat.KV_BLOCKS_TOTAL)
    return {
        "pid": view.engine_pid,
        "state": state,
        "device": view.device() or "-",
        "running": view.stat(Stat.RUNNING),
        "waiting": view.stat(Stat.WAITING),
        "kv_used": f"{100 * used / total:.0f}%" if total else "-",
        "tokens": view.stat(Stat.GENERATED_TOKENS),
    }
