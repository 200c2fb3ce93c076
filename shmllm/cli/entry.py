"""Where the command `shmllm` begins: what it does before it loads the rest of itself.

This module imports nothing else at its top, because an interrupt meanwhile is a traceback.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Runs the command. Ctrl-C while it is loaded ends the process as the signal does."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from shmllm.cli.main import main as run

    signal.signal(signal.SIGINT, handler)
    run()
