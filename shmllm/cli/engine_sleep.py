"""`shmllm engine sleep` and `wake`: free and restore the memory of a named engine."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from shmllm.cli.named import attached_client

if TYPE_CHECKING:
    from shmllm.outputs.sleep_report import SleepReport

POLL_S = 0.05
EPILOG = """\b
Examples:
  shmllm engine sleep main                     frees keys and values
  shmllm engine sleep main --level 2           frees weights too; they must be loaded again
  shmllm engine wake main
  shmllm engine wake main --tag weights
"""


@click.command("sleep", epilog=EPILOG)
@click.argument("name")
@click.option(
    "--level",
    type=click.IntRange(0, 2),
    default=1,
    show_default=True,
    help="0 stops scheduling, 1 also frees keys and values, 2 also frees the weights.",
)
@click.option(
    "--mode",
    type=click.Choice(["abort", "wait", "keep"]),
    default="abort",
    show_default=True,
    help="abort ends running requests, wait lets them finish, keep resumes them after `wake`.",
)
def sleep(name: str, level: int, mode: str) -> int:
    """Free memory of the engine called NAME until `wake`."""
    import time

    from shmllm.frontend.pausing import fall_asleep, next_or_value

    with attached_client(name) as client:
        steps = fall_asleep(client.call, level, mode)
        with contextlib.closing(steps):
            while (report := next_or_value(steps)) is None:
                time.sleep(POLL_S)
        _show(report)
    return 0


@click.command("wake", epilog=EPILOG)
@click.argument("name")
@click.option(
    "--tag",
    "tags",
    multiple=True,
    type=click.Choice(["weights", "kv_cache", "scheduling"]),
    help="Wake only this part. May be given several times.  [default: all]",
)
def wake(name: str, tags: tuple[str, ...]) -> int:
    """Restore the memory of the engine called NAME.

    The exit code is 1 while weights are missing.
    """
    from shmllm.frontend.pausing import wake_up

    with attached_client(name) as client:
        report = wake_up(client.call, tags or None)
        _show(report)
    return int(bool(report.num_missing) and not report.asleep)


def _show(report: SleepReport) -> None:
    click.echo(report.table())
    click.echo(f"{report.state()}; {report.seconds:.3f} s", err=True)
