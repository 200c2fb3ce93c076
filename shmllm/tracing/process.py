"""The recorders of this process: one for each trace, which all callers in the process share.

This module owns the table of recorders. A forked child begins with an empty table, because it must
not write into its parent's recordings.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from shmllm.tracing.directory import VARIABLE, SharedDirectory
from shmllm.tracing.recorder import Recorder

logger = logging.getLogger(__name__)

_recorders: dict[Path, Recorder] = {}
os.register_at_fork(after_in_child=_recorders.clear)


def recorder_in(directory: Path, role: str) -> Recorder:
    """This process's recorder for a trace; the first call creates it.

    Args:
        directory: the directory of the trace.
        role: the role of this process in the trace, for example "front end"; only the first call
            uses it.

    Raises:
        OSError: the process cannot create a recording in the directory.
        ValueError: the path is no directory of a trace.
    """
    if directory not in _recorders:
        facts = {"role": role, "command": " ".join(sys.argv)[:500]}
        _recorders[directory] = recorder = Recorder(SharedDirectory(directory), facts)
        recorder.at_end(lambda: _recorders.pop(directory, None))
    return _recorders[directory]


def recorder_of_environment(role: str) -> Recorder | None:
    """The recorder for the trace that the environment names, as under `shmllm trace -- command`;
    None if it names none. If recording is impossible, this logs a warning and returns None, so
    that the program continues."""
    value = os.environ.get(VARIABLE)
    return recorder_if_possible(Path(value), role) if value else None


def recorder_if_possible(directory: Path, role: str) -> Recorder | None:
    """The same as `recorder_in`, but logs a warning and returns None instead of raising."""
    try:
        return recorder_in(directory, role)
    except (OSError, ValueError, TypeError) as problem:
        logger.warning("this process is missing in the trace: %s", problem)
        return None
