"""`shmllm bench`: how fast an engine is here."""

from __future__ import annotations

import click

from shmllm.cli.bench_generation import latency, throughput
from shmllm.cli.bench_ipc import ipc
from shmllm.cli.bench_output import describe_machine
from shmllm.cli.bench_startup import startup

__all__ = ["bench", "describe_machine"]


@click.group()
def bench() -> None:
    """Measure an engine on this machine."""


for command in (latency, throughput, startup, ipc):
    bench.add_command(command)
