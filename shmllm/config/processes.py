"""How the processes that compute begin and end.

Engines, ranks and their helpers are started by exec, in sessions of their own: they inherit nothing
that the caller initialised (threads, CUDA), and no signal of the caller's terminal reaches them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from subprocess import DEVNULL, Popen
from typing import IO, NoReturn

from shmllm.config.environment import engine_environment

Output = int | IO[bytes] | None


def start(
    command: Sequence[str], output: Output = None, pass_fds: Sequence[int] = ()
) -> Popen[bytes]:
    """Start a process that computes, without standard input.

    Args:
        command: the program and its arguments.
        output: for its stdout and stderr; None for those of this process.
        pass_fds: the descriptors that it inherits, under the same numbers.
    """
    return Popen(
        command,
        stdin=DEVNULL,
        stdout=output,
        stderr=output,
        cwd="/",
        env=engine_environment(),
        pass_fds=pass_fds,
        start_new_session=True,
    )


def run_to_end(main: Callable[[], int]) -> NoReturn:
    """Call a program's main function, and end this process with the exit code that it returns.

    The interpreter frees every object before it ends, which takes a process that has imported torch
    0.15 s. This process ends as those of multiprocessing do, without that: functions registered
    with `atexit` run, and files that nothing has closed lose what they have not yet written.
    """
    code = main()
    if any(not thread.daemon for thread in threading.enumerate()[1:]):
        sys.exit(code)  # it waits for these threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, broken or closed
            stream.flush()
    os._exit(code)
