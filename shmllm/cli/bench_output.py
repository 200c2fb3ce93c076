"""What the benchmarks share: where their figures go, and how far they are.

Owns options, files and progress; must not know what is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

PLOT_SUFFIXES = (".svg", ".html")
STDOUT = "-"


def _plot_path(_: click.Context, __: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and value.suffix not in PLOT_SUFFIXES:
        raise click.BadParameter(f"the name has to end in {' or '.join(PLOT_SUFFIXES)}")
    return value


plot_option = click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=_plot_path,
    help="A picture: FILE.svg or FILE.html.",
)
json_option = click.option(
    "--json",
    "--output-json",
    "json_file",
    type=click.File("w", encoding="utf-8", lazy=True),
    help="All figures as JSON; - for stdout, where tables go to stderr then.",
)


def say(text: str, json_file: Any) -> None:
    """Show a table, on stdout unless that is for JSON."""
    click.echo(text, err=json_file is not None and json_file.name == STDOUT)


def write_json(record: Any, json_file: Any) -> None:
    if json_file is not None:
        json.dump(record, json_file, indent=2)
        json_file.write("\n")


def write_plot(path: Path | None, draw: Callable[[], str], title: str) -> None:
    """Draw, if there is a name for it: an SVG, alone or in an HTML page."""
    from shmllm.bench.chart import page

    if path is not None:
        picture = draw()
        path.write_text(picture if path.suffix == ".svg" else page(picture, title), "utf-8")


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr where that is a terminal. What is yielded names the next of `total`
    pieces of work."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=total)
        began = 0

        def begin(name: str) -> None:
            nonlocal began
            bar.update(task, description=name, completed=began)
            began += 1

        yield begin


def describe_machine() -> dict[str, Any]:
    """What the figures depend on, without naming the machine."""
    model = "unknown"
    with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
        for line in cpuinfo:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "load_average": os.getloadavg()[0],
    }


def machine_line(machine: dict[str, Any]) -> str:
    """The same in a line under a picture's title."""
    return f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}"
