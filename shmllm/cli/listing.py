"""Prints records as a table, for commands that list something."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

NARROWEST = 8
GAP = "  "


def print_records(
    columns: Sequence[str], records: Sequence[Mapping[str, Any]], shrinking: Sequence[str] = ()
) -> None:
    """Prints a header and one line per record on stdout; a missing value is "-".

    Args:
        columns: the keys of the records to print, in order.
        records: the records.
        shrinking: the columns whose texts lose their ends if a line would be longer than a line of
            the terminal. Without a terminal, nothing is shortened.
    """
    rows = [list(columns), *([_cell(r.get(c)) for c in columns] for r in records)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns - len(GAP) * (len(columns) - 1)
        _shrink(widths, [columns.index(name) for name in shrinking], room)
    for row in rows:
        cells = zip(row, widths, strict=True)
        click.echo(GAP.join(_cut(cell, width).ljust(width) for cell, width in cells).rstrip())


def _shrink(widths: list[int], indices: Sequence[int], room: int) -> None:
    """Makes the widest of some columns narrower, until all columns fit or none can be narrower."""
    while sum(widths) > room and indices:
        widest = max(indices, key=lambda index: widths[index])
        if widths[widest] <= NARROWEST:
            return
        widths[widest] -= 1


def _cell(value: Any) -> str:
    return "-" if value is None else str(value)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def age(seconds: float) -> str:
    """A duration with a suitable unit."""
    seconds = max(seconds, 0)
    for unit, name in ((86400, "d"), (3600, "h")):
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"


def size(num_bytes: int) -> str:
    """A number of bytes with a suitable unit."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes} bytes"
