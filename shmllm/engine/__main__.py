"""Starts an engine process.

    python -m shmllm.engine --private CONTROL_FD CLIENT_FD FRONT_END_PIDFD [BELL_FD]
    python -m shmllm.engine --named NAME CONFIG_JSON

This module imports little, so that Ctrl-C in the terminal of a named engine ends it without a
traceback from the first moment; `EngineProcess` takes the signal later.
"""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run the engine that the command line describes. Returns the exit code."""
    from shmllm.engine.program import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from shmllm.config.processes import run_to_end

    run_to_end(main)
