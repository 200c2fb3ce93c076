"""`shmllm bench ipc`: compares the shared-memory transport with ZeroMQ, pipes and queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from shmllm.cli.bench_output import (
    BenchOutput,
    describe_machine,
    machine_line,
    output_options,
    progress,
)
from shmllm.extras import install_command

if TYPE_CHECKING:
    from shmllm.bench.measure import Comparison

QUICK_MESSAGES = 20


def _split(_: click.Context, __: click.Parameter, values: Sequence[str]) -> list[str]:
    return [name.strip() for value in values for name in value.split(",") if name.strip()]


@click.command()
@click.option(
    "--arms",
    "variants",
    multiple=True,
    callback=_split,
    help="Variants to compare: names or patterns, separated by commas.  [default: all]",
)
@click.option(
    "--cases",
    multiple=True,
    callback=_split,
    help="Cases to run: names or patterns, such as 'rtt-*,add-512'.  [default: all]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Measuring time of each variant in each case.",
)
@click.option(
    "--messages",
    type=click.IntRange(min=1),
    help="Messages of each variant in each case and round, instead of --seconds.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Rounds through all cases and variants.",
)
@click.option("--quick", is_flag=True, help="Run one round of a few messages, as a test.")
@click.option(
    "--pin", is_flag=True, help="Pin front ends to the first CPU and cores to the last one."
)
@output_options
def ipc(
    variants: list[str],
    cases: list[str],
    seconds: float,
    messages: int | None,
    rounds: int,
    quick: bool,
    pin: bool,
    output: BenchOutput,
) -> None:
    """Compare shared memory with ZeroMQ, pipes and queues, in round trips of real messages.

    Each variant runs in two processes, in turns with the other variants. In a round trip the sender
    builds, encodes and sends a message, and the receiver decodes it and sends eight bytes back.
    The variants are shm-latency, shm-balanced, shm-idle, zmq, zmq-nocopy, pipe, queue, faster-fifo
    and iceoryx2. Variants whose package is missing are skipped.
    """
    from shmllm.bench.cases import CASES, select
    from shmllm.bench.measure import Comparison, Effort
    from shmllm.bench.variants import VARIANTS, split_by_availability

    try:
        available, skipped = split_by_availability(select(variants, list(VARIANTS)))
        names = select(cases, list(CASES))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    for line in skipped:
        click.echo(line, err=True)
    if skipped:
        click.echo(f"all variants run after: {install_command('bench')}", err=True)
    if not available:
        raise click.UsageError("no package of these variants is installed")
    if quick:
        rounds, messages = 1, messages or QUICK_MESSAGES
    comparison = Comparison(available, names, Effort(rounds, seconds, messages, pin))
    with progress(comparison.num_runs) as begin:
        comparison.run(begin)
    _write(comparison, names, skipped, output)


def _write(
    comparison: Comparison, names: Sequence[str], skipped: Sequence[str], output: BenchOutput
) -> None:
    from shmllm.bench import plot
    from shmllm.bench.report import figure_tables, speedup_table

    results = comparison.results()
    machine = describe_machine()
    output.show(figure_tables(results, names))
    output.show(speedup_table(comparison.samples, names, list(results)))
    record = {"machine": machine, "arms": results, "skipped": list(skipped)}
    subtitle = machine_line(machine)
    output.write(record, lambda: plot.svg(results, names, subtitle), "shmllm bench ipc")
