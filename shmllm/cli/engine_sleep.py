"""`shmllm engine sleep` and `wake`: a named engine gives its memory back, and has it again.

Owns options and what is printed. Loads no tokenizer: it needs none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from shmllm.client.attached import AttachedEngineClient
    from shmllm.outputs.sleep_report import SleepReport

POLL_S = 0.05
EPILOG = """\b
Examples:
  shmllm engine sleep main                     keys and values go
  shmllm engine sleep main --level 2           weights, too: they have to be loaded again
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
    help="0 only stops scheduling, 1 drops keys and values, 2 drops the weights, too.",
)
@click.option(
    "--mode",
    type=click.Choice(["abort", "wait", "keep"]),
    default="abort",
    show_default=True,
    help="What becomes of requests: ended, waited for, or kept until the engine is awake.",
)
def sleep(name: str, level: int, mode: str) -> int:
    """Have the engine called NAME give memory back until `wake`."""
    import time

    from shmllm.frontend.pausing import fall_asleep, next_or_value

    with _attached(name) as client:
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
    help="Wake this part alone; may be repeated.  [default: all]",
)
def wake(name: str, tags: tuple[str, ...]) -> int:
    """Have the engine called NAME wake up. Exit code 1 while weights are missing."""
    from shmllm.frontend.pausing import wake_up

    with _attached(name) as client:
        report = wake_up(client.call, tags or None)
        _show(report)
    return int(bool(report.num_missing) and not report.asleep)


@contextlib.contextmanager
def _attached(name: str) -> Iterator[AttachedEngineClient]:
    from shmllm.client.attached import AttachedEngineClient

    client = AttachedEngineClient(name)
    try:
        client.wait_ready()
        yield client
    finally:
        client.close()


def _show(report: SleepReport) -> None:
    click.echo(report.table())
    click.echo(f"{report.state()}; {report.seconds:.3f} s", err=True)
