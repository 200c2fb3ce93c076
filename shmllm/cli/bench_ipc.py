"""`shmllm bench ipc`: what a hop between front end and engine costs, here and elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shmllm.cli.bench_output import (
    describe_machine,
    json_option,
    machine_line,
    plot_option,
    progress,
    say,
    write_json,
    write_plot,
)

if TYPE_CHECKING:
    from shmllm.bench.measure import Comparison

QUICK_MESSAGES = 20


def _split(_: click.Context, __: click.Parameter, values: Sequence[str]) -> list[str]:
    return [name.strip() for value in values for name in value.split(",") if name.strip()]


@click.command()
@click.option("--arms", multiple=True, callback=_split, help="Names or patterns, by comma.")
@click.option("--cases", multiple=True, callback=_split, help="Likewise: 'rtt-*,add-512'.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Measuring time of each arm in each case.",
)
@click.option(
    "--messages",
    type=click.IntRange(min=1),
    help="Messages of each arm in each case and round, instead of --seconds.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--quick", is_flag=True, help="One round of a few messages, to see that it runs.")
@click.option(
    "--pin", is_flag=True, help="Front ends stay on the first CPU, cores on the last one."
)
@json_option
@plot_option
def ipc(
    variants: list[str],
    cases: list[str],
    seconds: float,
    messages: int | None,
    rounds: int,
    quick: bool,
    pin: bool,
    json_file: Any,
    plot_path: Path | None,
) -> None:
    """Shared memory against ZeroMQ, pipes and queues, in round trips of real messages.

    Each arm has two processes, which take turns with those of the other arms. A round trip
    is: build and encode a message, send it, receive and decode it, send eight bytes back.
    ARMS: shm-latency, shm-balanced, shm-idle, zmq, zmq-nocopy, pipe, queue, faster-fifo,
    iceoryx2. What is not installed is named and skipped: pip install 'shmllm[bench]'.
    """
    from shmllm.bench.cases import CASES, select
    from shmllm.bench.measure import Comparison, Effort
    from shmllm.bench.variants import VARIANTS, split_by_presence

    try:
        present, skipped = split_by_presence(select(variants, list(VARIANTS)))
        names = select(cases, list(CASES))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    for line in skipped:
        click.echo(line, err=True)
    if not present:
        raise click.UsageError("none of these arms can run here")
    if quick:
        rounds, messages = 1, messages or QUICK_MESSAGES
    comparison = Comparison(present, names, Effort(rounds, seconds, messages, pin))
    _run_with_progress(comparison)
    _write(comparison, names, skipped, json_file, plot_path)


def _run_with_progress(comparison: Comparison) -> None:
    with progress(comparison.num_runs) as begin:
        comparison.run(begin)


def _write(
    comparison: Comparison,
    names: Sequence[str],
    skipped: Sequence[str],
    json_file: Any,
    plot_path: Path | None,
) -> None:
    from shmllm.bench import plot
    from shmllm.bench.report import figure_tables, speedup_table

    results = comparison.results()
    machine = describe_machine()
    say(figure_tables(results, names), json_file)
    say(speedup_table(comparison.samples, names, list(results)), json_file)
    write_json({"machine": machine, "arms": results, "skipped": list(skipped)}, json_file)
    subtitle = machine_line(machine)
    write_plot(plot_path, lambda: plot.svg(results, names, subtitle), "shmllm bench ipc")
