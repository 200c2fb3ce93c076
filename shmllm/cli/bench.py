"""`shmllm bench`: how fast an engine is here."""

from __future__ import annotations

import click


@click.group()
def bench() -> None:
    """Measure an engine on this machine."""
