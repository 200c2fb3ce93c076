"""Ctrl-C while a command or a named engine loads its modules: no traceback."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.programs import run_source

INTERRUPTED_AT = """
import os, runpy, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal

class Interrupt:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""
COMMAND = "from shmllm.cli.entry import main; main()"
ENGINE = "runpy.run_module('shmllm.engine', run_name='__main__')"


@pytest.mark.parametrize(
    ("start", "module"),
    [
        (COMMAND, "click"),
        (COMMAND, "shmllm.cli.trace"),
        (ENGINE, "shmllm.engine.process"),
    ],
)
def test_an_interrupt_while_modules_are_loaded_is_the_death_by_it(start: str, module: str) -> None:
    done = run_source(INTERRUPTED_AT + start, module)
    assert done.returncode == -signal.SIGINT
    assert done.stderr == b""


def test_the_command_answers() -> None:
    done = run_source(f"import sys; sys.argv[1:] = ['--version']; {COMMAND}")
    assert done.returncode == 0
    assert done.stdout.startswith(b"shmllm, version ")


def test_a_current_directory_that_is_gone_is_named(tmp_path: Path) -> None:
    gone = "import os, sys; os.chdir(sys.argv[1]); os.rmdir(sys.argv[1]); "
    arguments = "sys.argv[1:] = ['quantize', 'tiny', 'out', '--format', 'gguf-q8_0']; "
    done = run_source(gone + arguments + COMMAND, str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == b"shmllm: the current directory does not exist any more\n"
