"""The recorders of this process: one for each trace, shared by all who record here.

Owns who has one already. A child of fork has none: it would write into its parent's.
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
    """This process's recorder for a trace.

    Args:
        directory: of the trace.
        role: what this process is, where it is not known already.

    Raises:
        OSError: it cannot record there.
        ValueError: that is no trace's directory.
    """
    if directory not in _recorders:
        facts = {"role": role, "command": " ".join(sys.argv)[:500]}
        _recorders[directory] = recorder = Recorder(SharedDirectory(directory), facts)
        recorder.at_end(lambda: _recorders.pop(directory, None))
    return _recorders[directory]


def recorder_of_environment(role: str) -> Recorder | None:
    """The recorder that `shmllm trace -- command` asks for; None without it. A trace that
    cannot be written is a warning: what is traced goes on."""
    value = os.environ.get(VARIABLE)
    return recorder_if_possible(Path(value), role) if value else None


def recorder_if_possible(directory: Path, role: str) -> Recorder | None:
    """As `recorder_in`, with a warning instead of an error."""
    try:
        return recorder_in(directory, role)
    except (OSError, ValueError, TypeError) as problem:
        logger.warning("this process is missing in the trace: %s", problem)
        return None
