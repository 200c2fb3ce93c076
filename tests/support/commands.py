"""Runs `shmllm` in this process: its start takes longer than most commands."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from support.programs import CLI, ELSEWHERE, Completed, environment, python

from shmllm.cli.main import main


@contextlib.contextmanager
def _descriptors(replacements: dict[int, int]) -> Iterator[None]:
    """Other files under these numbers meanwhile."""
    before = {number: os.dup(number) for number in replacements}
    try:
        for number, other in replacements.items():
            os.dup2(other, number)
        yield
    finally:
        for number, other in before.items():
            os.dup2(other, number)
            os.close(other)


@contextlib.contextmanager
def _streams() -> Iterator[None]:
    """The objects of a new interpreter in `sys`, for the present descriptors."""
    with contextlib.ExitStack() as stack:
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            mode = "w" if number else "r"
            stream = stack.enter_context(open(number, mode, encoding="utf-8", closefd=False))
            stack.enter_context(patch.object(sys, name, stream))
        yield


def command(*arguments: str, input: bytes = b"", output: int | None = None) -> Completed:
    """Run `shmllm` with these arguments on files in place of the standard streams, or on another
    descriptor in place of stdout.

    Descriptors, exit codes and messages are those of a process of its own; what the interpreter
    does at its start and at its end, signals, pipes, terminals and locales need such a process.
    So does a command that changes its process, as `top` does, which lowers its priority.
    """
    with contextlib.ExitStack() as stack:
        # A command ends the timer that is the deadline of the test.
        stack.callback(signal.setitimer, signal.ITIMER_REAL, *signal.getitimer(signal.ITIMER_REAL))
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        files[0].write(input)
        files[0].seek(0)
        numbers = {number: file.fileno() for number, file in enumerate(files)}
        if output is not None:
            numbers[1] = output
        with (
            _descriptors(numbers),
            _streams(),
            patch.object(sys, "argv", ["shmllm", *arguments]),
            patch.object(logging.getLogger(), "handlers", []),  # pytest's take what goes to stderr
            patch.dict(os.environ, environment()),
            contextlib.chdir(ELSEWHERE),
        ):
            try:
                main()
                code: Any = 0
            except SystemExit as end:
                code = end.code or 0
            finally:
                sys.stderr.flush()  # the command has made a stream of its own
        outputs = []
        for file in files[1:]:
            file.seek(0)
            outputs.append(file.read())
    return Completed(["shmllm", *arguments], code, *outputs)


def shmllm(*arguments: str, **options: Any) -> Completed:
    """Run `shmllm`: in this process, or in one of its own if it is given options for one."""
    if options.keys() <= {"input"}:
        return command(*arguments, **options)
    return python("-c", CLI, *arguments, **options)
