"""`shmllm top`: shows the current statistics of this user's engines."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from shmllm.cli.interrupts import EXIT_INTERRUPTED, Interrupted, interruptible
from shmllm.errors import SegmentError

if TYPE_CHECKING:
    from shmllm.monitor.find import FoundEngine
    from shmllm.monitor.track import Track

NICENESS = 10


@click.command()
@click.argument("name", required=False)
@click.option(
    "--interval",
    type=click.FloatRange(0.05, 3600),
    default=1.0,
    show_default=True,
    help="Seconds between two updates; figures cover this interval.",
)
@click.option("--once", is_flag=True, help="Print the figures of one interval, and exit.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print a JSON list of engines.")
def top(name: str | None, interval: float, once: bool, as_json: bool) -> int:
    """Show all engines of this user, or the one called NAME (a name or a pid).

    The command reads shared memory and does not slow engines down. It also finds the private
    engines of LLM(). Without a terminal it behaves as with --once.

    \b
    shmllm top
    shmllm top main --interval 0.2
    shmllm top --once --json | jq '.[].generated_tokens_per_s'
    """
    from rich.console import Console

    from shmllm.sigbus import bus_guard

    os.nice(NICENESS)  # engines have priority
    bus_guard.install()
    engines = _wanted(name)
    console = Console()
    try:
        with interruptible():
            if once or as_json or not (console.is_terminal and sys.stdin.isatty()):
                _print_once(console, engines, interval, as_json, name is not None)
                return 0
            return _show(console, engines[0] if name else None, interval)
    except Interrupted as interrupted:
        if once or interrupted.exit_code != EXIT_INTERRUPTED:
            raise
        return 0


def _wanted(name: str | None) -> list[FoundEngine]:
    from shmllm.monitor.find import choose, find_engines

    engines = find_engines()
    if not engines:
        raise SegmentError(
            "no engine of this user runs; start one with: shmllm engine start NAME --detach"
        )
    if name is None:
        return engines
    if (chosen := choose(engines, name)) is None:
        known = ", ".join(engine.title for engine in engines)
        raise SegmentError(f"no engine has the name or pid {name!r}; there are: {known}")
    return [chosen]


def _show(console: Any, only: FoundEngine | None, interval_s: float) -> int:
    from shmllm.monitor.keys import keyboard
    from shmllm.monitor.live import LiveScreen
    from shmllm.monitor.track import Tracks

    tracks = Tracks(lambda: [only]) if only else Tracks()
    try:
        with keyboard(sys.stdin.fileno()) as keys:
            identity = only.identity if only else None
            farewell = LiveScreen(console, keys, tracks, interval_s, identity).run()
    finally:
        tracks.close()
    if farewell:
        click.echo(farewell)
    return 0


def _print_once(
    console: Any, engines: list[FoundEngine], interval_s: float, as_json: bool, is_one: bool
) -> None:
    from shmllm.monitor.screen import engine_screen, list_screen

    tracks = _tracks_of(engines)
    time.sleep(interval_s)
    for track in tracks:
        track.update()
    if as_json:
        click.echo(json.dumps([track.figures for track in tracks], indent=2))
    elif is_one:
        [track] = tracks
        console.print(engine_screen(track.figures, track.history, track.engine.title))
    else:
        console.print(list_screen([(t.engine.title, t.figures) for t in tracks], None))
    for track in tracks:
        track.close()


def _tracks_of(engines: list[FoundEngine]) -> list[Track]:
    """Tracks of the engines that still run."""
    from shmllm.errors import IpcError
    from shmllm.monitor.track import Track

    tracks = []
    for engine in engines:
        try:
            tracks.append(Track(engine))
        except IpcError as error:
            if len(engines) == 1:
                raise
            click.echo(f"shmllm: {engine.title}: {error}", err=True)
    return tracks
