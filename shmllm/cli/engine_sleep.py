"""`shmllm engine sleep` and `wake`: free and restore the memory of a named engine."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from shmllm.cli.named import attached_client

if TYPE_CHECKING:
    from shmllm.client.attached import AttachedEngineClient
    from shmllm.outputs.sleep_report import SleepReport

POLL_S = 0.05
EPILOG = """\b
Examples:
  shmllm engine sleep main                     frees keys and values
  shmllm engine sleep main --level 2           discards the weights, too
  shmllm engine wake main                      loads them again, if they were discarded
  shmllm engine wake main --tag weights
  shmllm engine wake main --no-reload          a program is going to write the weights
"""


@click.command("sleep", epilog=EPILOG)
@click.argument("name")
@click.option(
    "--level",
    type=click.IntRange(0, 2),
    default=1,
    show_default=True,
    help="0 stops scheduling, 1 also frees keys and values, 2 also discards the weights.",
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
    if report.num_missing:
        hint = f"`shmllm engine wake {name}` loads the weights again from the model's files"
        click.echo(hint, err=True)
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
@click.option(
    "--no-reload",
    is_flag=True,
    help="Leave discarded weights missing: a program is going to write them.",
)
def wake(name: str, tags: tuple[str, ...], no_reload: bool) -> int:
    """Restore the memory of the engine called NAME.

    Weights that sleep at level 2 discarded are loaded again as at the start: from the model's
    files, or the same random weights. Updates of the weights are lost.

    The exit code is 1 if the engine is not asleep, but weights are missing.
    """
    from shmllm.frontend.pausing import wake_up

    with attached_client(name) as client:
        report = wake_up(client.call, tags or None)
        _show(report)
        is_missing = bool(report.num_missing) and "weights" not in report.asleep
        if is_missing and not no_reload:
            _reload(client)
            is_missing = False
    return int(is_missing and not report.asleep)


def _reload(client: AttachedEngineClient) -> None:
    """Load the weights again, and say which ones."""
    from shmllm.wire.messages import Method
    from shmllm.wire.rpc import RpcCall

    before = client.call(Method.GET_WEIGHT_VERSION)
    loaded = client.run_on_worker(RpcCall("reload_weights"))
    version = client.call(Method.GET_WEIGHT_VERSION)
    click.echo(f"loaded {loaded} as version {version}, in place of version {before}", err=True)


def _show(report: SleepReport) -> None:
    click.echo(report.table())
    click.echo(f"{report.state()}; {report.seconds:.3f} s", err=True)
