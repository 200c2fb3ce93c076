"""Prints records as a table, for the `ls` commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click


def print_records(columns: Sequence[str], records: Sequence[Mapping[str, Any]]) -> None:
    """Prints a header and one line per record on stdout; a missing value is "-"."""
    rows = [list(columns), *([str(r.get(c, "-")) for c in columns] for r in records)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))
        click.echo(line.rstrip())
