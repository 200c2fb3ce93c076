"""`shmllm trace`: records front ends and engines, and writes one timeline.

This module owns a trace from its directory to the written file: it runs a command that records, or
asks a running engine to record for some time. It must not know the content of the records.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shmllm.cli.interrupts import Interrupted, interruptible
from shmllm.cli.named import attached_client
from shmllm.errors import EngineDeadError
from shmllm.version import __version__

if TYPE_CHECKING:
    from shmllm.client.attached import AttachedEngineClient
    from shmllm.tracing.directory import OwnedDirectory, Settings

POLL_S = 0.1
LAST_RECORDS_S = 2.0
MANY_RECORDS = 100_000
EXIT_SIGNAL = 128
_CLI = [sys.executable, "-c", "from shmllm.cli.main import main; main()"]

EPILOG = """\b
Examples:
  shmllm trace -o trace.json -- shmllm generate "def fibonacci(n):"
  shmllm trace -o trace.json.gz -- python my_script.py
  shmllm trace --attach main --seconds 5 -o trace.json

\b
The exit code is the command's. If the command dies, the trace holds what it recorded.
Ctrl-C ends an --attach early; the engine continues.
"""


@click.command(epilog=EPILOG, context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
@click.option(
    "-o",
    "--output",
    "target",
    default="trace.json",
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write; .gz compresses it.",
)
@click.option("--attach", metavar="NAME", help="Trace a running engine and its front ends.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="With --attach: how long to record.",
)
@click.option(
    "--buffer",
    "buffer_mib",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    metavar="MIB",
    help="Recording buffer of each process; a MiB holds 16,384 records.",
)
def trace(
    command: tuple[str, ...], target: Path, attach: str | None, seconds: float, buffer_mib: int
) -> int:
    """Record the actions of front ends and engines, and write one timeline.

    Give a COMMAND to run, or with --attach the name of a running engine.
    """
    from shmllm.tracing.directory import Settings

    if bool(command) == bool(attach):
        raise click.UsageError("give a command behind --, or --attach NAME, and not both")
    _check_writable(target)
    most_bytes = buffer_mib * 1024 * 1024
    if attach is None:
        return _trace_command(list(command), target, Settings(most_bytes))
    return _trace_engine(attach, target, most_bytes, seconds)


def _check_writable(target: Path) -> None:
    """Checks the output before anything runs.

    Raises:
        click.UsageError: the file cannot be written.
    """
    place = target if target.exists() else target.absolute().parent
    if not os.access(place, os.W_OK):
        raise click.UsageError(f"cannot write {target}: {place} does not exist or is not writable")


def _trace_command(command: list[str], target: Path, settings: Settings) -> int:
    with _owned(settings) as directory:
        begin_ns = time.monotonic_ns()
        code = _run(_with_interpreter(command), directory)
        _await_last_records(directory)
        if code:
            click.echo(
                f"the command ended with exit code {code}; writing what was recorded", err=True
            )
        _write(directory, target, begin_ns, {"command": " ".join(command), "exit_code": code})
        return code


def _with_interpreter(command: list[str]) -> list[str]:
    """Replaces `shmllm`, which may also be left out, by this interpreter and the CLI's entry point.

    Other commands stay as they are.
    """
    root = click.get_current_context().find_root().command
    if command[0] == "shmllm":
        return [*_CLI, *command[1:]]
    if isinstance(root, click.Group) and command[0] in root.commands:
        return [*_CLI, *command]
    return command


def _run(command: list[str], directory: OwnedDirectory) -> int:
    """Runs the command with this process's streams and returns its exit code.

    The command handles signals itself; this process passes on SIGTERM.
    """
    from shmllm.config.environment import import_environment
    from shmllm.tracing.directory import VARIABLE

    environment = import_environment(os.environ) | {VARIABLE: str(directory.path)}
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: Any) -> None:
        if process is not None:
            process.send_signal(number)

    # A terminal sends Ctrl-C to the command too, so this process does not pass it on.
    handlers: dict[int, Any] = {signal.SIGTERM: pass_on, signal.SIGINT: _do_nothing}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        process = subprocess.Popen(command, env=environment)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else EXIT_SIGNAL - code


def _do_nothing(number: int, frame: Any) -> None:
    """Ignores a signal. Unlike SIG_IGN, the command does not inherit this handler."""


def _await_last_records(directory: OwnedDirectory) -> None:
    """Waits until all recording processes have ended: an engine outlives a killed front end."""
    from shmllm.tracing.layout import SUFFIX
    from shmllm.tracing.reading import pid_of

    deadline = time.monotonic() + LAST_RECORDS_S
    for path in directory.path.glob("*" + SUFFIX):
        while _is_running(pid_of(path)) and time.monotonic() < deadline:
            time.sleep(POLL_S / 10)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _trace_engine(name: str, target: Path, most_bytes: int, seconds: float) -> int:
    from shmllm.tracing.directory import Settings
    from shmllm.wire.messages import Method

    with attached_client(name) as client:
        begin_ns = time.monotonic_ns()
        until_ns = begin_ns + int(seconds * 1e9)
        with _owned(Settings(most_bytes, until_ns)) as directory:
            client.call(Method.TRACE, str(directory.path))
            death = _wait(client, until_ns)
            _write(directory, target, begin_ns, {"engine": name}, {client.connection})
            if death is not None:
                raise death
        return 0


def _wait(client: AttachedEngineClient, until_ns: int) -> EngineDeadError | None:
    """Waits until the time is over, Ctrl-C, or the engine's death, whose error it returns."""
    try:
        with interruptible():
            while (left_s := (until_ns - time.monotonic_ns()) / 1e9) > 0:
                client.poll(min(left_s, POLL_S)).clear()
    except Interrupted:
        click.echo("ended early; writing what was recorded", err=True)
    except EngineDeadError as death:
        click.echo("the engine died; writing what was recorded", err=True)
        return death
    return None


@contextlib.contextmanager
def _owned(settings: Settings) -> Iterator[OwnedDirectory]:
    from shmllm.tracing.directory import OwnedDirectory

    directory = OwnedDirectory(settings)
    try:
        yield directory
    finally:
        directory.close()


def _write(
    directory: OwnedDirectory,
    target: Path,
    begin_ns: int,
    about: dict[str, Any],
    hidden: Sequence[int] | set[int] = (),
) -> None:
    from shmllm.tracing.reading import read_all
    from shmllm.tracing.timeline import make_timeline
    from shmllm.tracing.writing import summary, write_timeline
    from shmllm.wire.messages import RecordKind

    gc.disable()  # each collection would visit millions of records, and all of them stay alive
    recordings = read_all(directory.path)
    if not recordings:
        click.echo("nothing was recorded: no front end of shmllm was started", err=True)
        if target.is_file() and target.stat().st_size:
            click.echo(f"{target} stays as it was", err=True)
            return
    num_records = sum(len(recording.records) for recording in recordings)
    if num_records > MANY_RECORDS:
        click.echo(f"merging {num_records:,} records", err=True)
    kinds = {int(kind): kind.name for kind in RecordKind}
    timeline = make_timeline(recordings, begin_ns, kinds, hidden)
    num_events = write_timeline(timeline, target, {"written_by": f"shmllm {__version__}", **about})
    for line in summary(timeline, target, num_events):
        click.echo(line)
