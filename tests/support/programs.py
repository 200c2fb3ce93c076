"""Front ends in processes of their own: started from a source text, watched, and reaped.

A test that expects a crash or a hang looks at it from outside: whatever happens to the
front end, the test process goes on and can say what it saw.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, AnyStr

from support.waiting import PATIENCE_S

import shmllm

ROOT = Path(shmllm.__file__).resolve().parents[1]
ELSEWHERE = "/"  # with -c the present directory comes first, and would hide what is installed
CLI = "from shmllm.cli.main import main; main()"

SLOW_CLI = f"""
import time
from shmllm.batch.output import RecordFile
write = RecordFile.write
def write_and_wait(file, line):
    write(file, line)
    time.sleep(0.02)
RecordFile.write = write_and_wait
{CLI}
"""
"""CLI whose jobs write at most 50 rows a second: a test that looks at the file meets one under
way, however late it looks."""

Completed = subprocess.CompletedProcess[bytes]


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, in which `import shmllm` finds the package under test."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    values = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"}
    return values | dict(changes or {})


def environment_of_test_files() -> dict[str, str]:
    """`environment` for a test file that is started as a program: it finds what it imports here."""
    return environment({"PYTHONPATH": os.pathsep.join(sys.path)})


def python(*arguments: str, env: Mapping[str, str] | None = None, **options: Any) -> Completed:
    """Run an interpreter to its end, which a test that hangs does not reach."""
    options.setdefault("timeout", PATIENCE_S)
    options.setdefault("cwd", ELSEWHERE)
    if "input" not in options:
        options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        env=environment(env),
        check=False,
        **options,
    )


def run_source(source: str, *arguments: str, **options: Any) -> Completed:
    """Run a source text with `-c`."""
    return python("-c", textwrap.dedent(source), *arguments, **options)


def result_of(done: Completed) -> Any:
    """The JSON value that a program printed as the only thing on its stdout."""
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def start_source(source: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start a source text whose stdout the test reads."""
    options.setdefault("cwd", ELSEWHERE)
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environment(),
        **options,
    )


def start_at_go(source: str, *arguments: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a source text that prints "ready" and then waits for a line, and send that line.

    Args:
        source: the source text.
        arguments: its arguments.
        env: the whole environment of the process.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", source, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
    )
    assert process.stdin is not None
    assert read_line(process) == b"ready\n"
    process.stdin.write(b"go\n")
    process.stdin.flush()
    return process


@contextmanager
def watched(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Kills the process if the block takes longer than PATIENCE_S, so that reading its pipes
    ends."""
    watchdog = threading.Timer(PATIENCE_S, process.kill)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()


def read_line(process: subprocess.Popen[AnyStr]) -> AnyStr:
    """The next line of its stdout; an empty one if it ends, or is killed after PATIENCE_S."""
    assert process.stdout is not None
    with watched(process):
        return process.stdout.readline()


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill a process, if it still runs, and close its pipes."""
    process.kill()
    with suppress(subprocess.TimeoutExpired):  # a child of its own has a pipe open
        process.communicate(timeout=PATIENCE_S)


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def children(pid: int) -> list[int]:
    """Pids of the processes that `pid` started and that run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid and is_running(int(entry.name)):
            found.append(int(entry.name))
    return found


def open_files(pid: int) -> list[str]:
    """What the descriptors of a process are, such as "socket:[4711]"."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # the one of this loop
            found.append(os.readlink(entry))
    return found


def sockets_of(pid: int) -> list[str]:
    """The sockets among the descriptors of a process."""
    return [name for name in open_files(pid) if name.startswith("socket:")]


def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
