"""`shmllm bench`: measures an engine and its transport on this machine."""

from __future__ import annotations

import click

from shmllm.cli.bench_generation import latency, throughput
from shmllm.cli.bench_ipc import ipc
from shmllm.cli.bench_parallel import parallel
from shmllm.cli.bench_startup import startup


@click.group()
def bench() -> None:
    """Measure an engine on this machine."""


for command in (latency, throughput, startup, parallel, ipc):
    bench.add_command(command)
