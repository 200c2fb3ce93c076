"""Where an engine process writes what it has to say besides its answers."""

from __future__ import annotations

import logging


def log_to_stderr() -> None:
    """Have messages of shmllm's loggers appear on stderr. For a named engine, whose stderr is
    its log; a private one's is its front end's, which learns all from answers."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    logger = logging.getLogger("shmllm")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
