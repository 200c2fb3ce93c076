"""Another user of the machine: programs that run as nobody, and a directory as /dev/shm is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.waiting import PATIENCE_S

UID = 65534
# The other user may not be able to read this interpreter's files, so the imports come first.
_BECOME_OTHER = f"""
import ctypes, fcntl, json, os, struct, sys
os.setgroups([])
os.setresgid({UID}, {UID}, {UID})
os.setresuid({UID}, {UID}, {UID})
os.umask(0)
"""


def why_impossible() -> str | None:
    """Why this process cannot run programs as another user; None if it can."""
    if os.geteuid() != 0:
        return "only root can run a program as another user"
    try:
        return None if run_as_other("print(os.geteuid())") == UID else "the user did not change"
    except subprocess.SubprocessError as error:
        return f"this root cannot become another user: {error}"


def start_as_other(source: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a source text as another user. It can use ctypes, fcntl, json, os, struct and sys."""
    return subprocess.Popen(
        [sys.executable, "-ISc", _BECOME_OTHER + source, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        env={},
    )


def run_as_other(source: str, *arguments: object) -> Any:
    """Run a source text as another user to its end. Returns the JSON value that it printed last."""
    process = start_as_other(source, *arguments)
    try:
        out, _ = process.communicate(timeout=PATIENCE_S)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    if process.returncode:
        raise subprocess.SubprocessError(f"exit code {process.returncode}")
    return json.loads(out.splitlines()[-1])


@contextmanager
def shared_directory() -> Iterator[Path]:
    """A directory in shared memory in which every user may create files, as in /dev/shm."""
    with tempfile.TemporaryDirectory(prefix="test-users-", dir="/dev/shm") as name:
        os.chmod(name, 0o1777)
        yield Path(name)
