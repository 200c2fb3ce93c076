"""The output of the `shmllm bench` commands: tables, a JSON record, a picture, a progress bar.

This module owns the options for them and the description of the machine. It must not know what a
command measures.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

STDOUT = "-"


@dataclass(frozen=True)
class BenchOutput:
    """The destinations of a command's figures.

    Attributes:
        json_file: the file for the JSON record; None for no record.
        plot_path: the file for the picture; None for no picture.
    """

    json_file: Any
    plot_path: Path | None

    def show(self, table: str) -> None:
        """Prints a table: on stdout, or on stderr if the JSON record goes to stdout."""
        click.echo(table, err=self.json_file is not None and self.json_file.name == STDOUT)

    def write(self, record: Any, draw: Callable[[], str], title: str) -> None:
        """Writes the JSON record and the picture, if the user asked for them.

        Args:
            record: the record, made of JSON values.
            draw: returns the picture as SVG.
            title: the title of the HTML page around the picture.
        """
        from shmllm.bench import chart

        if self.json_file is not None:
            json.dump(record, self.json_file, indent=2)
            self.json_file.write("\n")
        if self.plot_path is not None:
            chart.write(self.plot_path, draw(), title)


def _plot_path(_: click.Context, __: click.Parameter, value: Path | None) -> Path | None:
    from shmllm.bench.chart import SUFFIXES

    if value is not None and value.suffix not in SUFFIXES:
        raise click.BadParameter(f"the name has to end in {' or '.join(SUFFIXES)}")
    if value is not None:
        _check_folder(value)
    return value


def _json_file(_: click.Context, __: click.Parameter, value: Any) -> Any:
    if value is not None and value.name != STDOUT:
        _check_folder(Path(value.name))
    return value


def _check_folder(file: Path) -> None:
    """Raises click.BadParameter before the measurement if the file cannot be created after it."""
    folder = file.absolute().parent
    if not os.access(folder, os.W_OK):
        raise click.BadParameter(f"{folder} is no directory that can be written")


_plot_option = click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=_plot_path,
    help="Write a picture to FILE.svg or FILE.html.",
)
_json_option = click.option(
    "--json",
    "--output-json",
    "json_file",
    type=click.File("w", encoding="utf-8", lazy=True),
    callback=_json_file,
    help="Write all figures as JSON; - is stdout, and the tables then go to stderr.",
)


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --json and --plot to a command, which receives a `BenchOutput` as `output`."""

    @functools.wraps(command)
    def with_output(*, json_file: Any, plot_path: Path | None, **options: Any) -> Any:
        return command(output=BenchOutput(json_file, plot_path), **options)

    return _json_option(_plot_option(with_output))


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Shows a progress bar on stderr if stderr is a terminal.

    Args:
        total: the number of pieces of work.

    Yields:
        A function to call with the name of each piece of work before it begins.
    """
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
    """The properties of this machine that affect figures; its name is not among them."""
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
    """One line about the machine, for the subtitle of a picture."""
    return f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}"
