"""Writes the measured winners of a record into the table of tile sizes.

An entry changes if its winner takes less time than the present tile sizes by a margin, measured in
turn with them. It must not measure anything, so that a record can be written on any machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from gpu.figures import write_text
from gpu.parts import PARTS
from gpu.record import SCHEMA
from gpu.resume import digest
from shmllm_kernels.gpu.tiles import BESIDE_TILES, DEVICES, VERSION, Entry, TileTable

MARGIN = 0.03
"""The least gain that is written, as a share of the present time. It is an estimate of how far the
medians of two measurements of the same launch differ; no GPU has shown it."""
TUNING = {part.name: part for part in PARTS if part.target == "search:run"}


class RefusedRecord(ValueError):
    """A record must not change the table; the message says why in one sentence."""


def write_tiles(record: Path, table: Path, digest_of: Callable[..., str] = digest) -> list[str]:
    """Replaces the entries of the table whose winners are better by MARGIN.

    Args:
        record: the gpu-check.json of a run.
        table: tiles.json. Entries that do not change keep their lines.
        digest_of: returns the digest of the code that a part depends on.

    Returns:
        A line for each row of the record: what changed, or that nothing did, with the microseconds
        before and after.

    Raises:
        RefusedRecord: the record is none, is that of a rehearsal, has no measured tile sizes, or
            has those of another table, of other candidates or of kernels that do not exist.
        TileError: the table cannot be read.
    """
    found = read_record(record)
    present = TileTable.read(table)
    entries = {entry.place: entry for entry in present.entries}
    order = {kernel: n for n, kernel in enumerate(dict.fromkeys(e.kernel for e in present.entries))}
    sources, lines = dict(present.sources), []
    for part, rows in measured_rows(found, digest_of).items():
        name, source = source_of(found, part)
        for row in rows:
            if row["kernel"] not in order:
                raise RefusedRecord(f"{record}: the table has no kernel {row['kernel']!r}.")
            is_better = row["us_after"] <= (1 - MARGIN) * row["us_before"]
            lines.append(describe(row, is_better))
            if is_better:
                sources[name] = source
                place = row["kernel"], row["device"], row["size"]
                entries[place] = Entry(*place, config=row["after"], source=name)
    changed = sorted(
        entries.values(), key=lambda e: (order[e.kernel], DEVICES.index(e.device), e.size)
    )
    write_text(table, as_json(TileTable(sources, changed)))
    return lines


def read_record(path: Path) -> dict[str, Any]:
    """Returns a record whose figures mean something."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise RefusedRecord(f"{path} cannot be read: {problem}.") from None
    if not isinstance(found, dict) or not isinstance(found.get("parts"), dict):
        raise RefusedRecord(f"{path} is no record of gpu_check: it has no parts.")
    if found.get("schema") != SCHEMA:
        raise RefusedRecord(f"{path} has the schema {found.get('schema')}, not {SCHEMA}.")
    if found.get("rehearsal"):
        raise RefusedRecord(f"{path} is a rehearsal's record, which says nothing about a GPU.")
    return found


def measured_rows(
    record: Mapping[str, Any], digest_of: Callable[..., str] = digest
) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of each part of a record that has measured tile sizes."""
    found = {}
    for name, part in TUNING.items():
        outcome = record["parts"].get(name, {})
        tiles = outcome.get("figures", {}).get("tiles")
        if not tiles:
            continue
        if tiles["version"] != VERSION:
            raise RefusedRecord(
                f"The part {name!r} measured entries of version {tiles['version']}, "
                f"and the table has version {VERSION}."
            )
        if outcome["code"] != digest_of(part.code):
            raise RefusedRecord(
                f"The part {name!r} measured other candidates, kernels or entries than those here: "
                f"check out the commit of the record ({record.get('commit')}), or measure again."
            )
        found[name] = tiles["rows"]
    if not found:
        parts = " ".join(f"--only {name}" for name in TUNING)
        raise RefusedRecord(f"The record has no measured tile sizes: run gpu_check {parts}.")
    return found


def source_of(record: Mapping[str, Any], part: str) -> tuple[str, dict[str, str]]:
    """Returns the name and the description of a record as the source of entries."""
    card, _driver, *versions = record["parts"][part]["machine"].split(", ")
    date = record["date"].split()[0]
    used = [each for each in versions if each.startswith(("torch", "triton"))]
    source = {"card": card, "date": date, "versions": ", ".join(used)}
    return f"{card.split()[-1].lower()}-{date}", source | {"commit": str(record["commit"])}


def describe(row: Mapping[str, Any], is_better: bool) -> str:
    """Returns what becomes of a row of a record."""
    times = f"{row['us_before']:.2f} us before, {row['us_after']:.2f} us after"
    after = ", ".join(f"{name} {size}" for name, size in row["after"].items())
    what = after if is_better else "unchanged"
    return f"{row['kernel']} {row['device']} {row['size']}: {what} ({times})"


def as_json(table: TileTable) -> str:
    """Returns the file of a table: one line for each source and entry, without unused sources."""
    used = {entry.source for entry in table.entries}
    sources = (
        f"  {json.dumps(name)}: {json.dumps(of)}"
        for name, of in table.sources.items()
        if name in used
    )
    entries = (f"  {json.dumps(_row(entry))}" for entry in table.entries)
    return (
        f'{{\n "version": {VERSION},\n "sources": {{\n{_lines(sources)}\n }},\n'
        f' "entries": [\n{_lines(entries)}\n ]\n}}\n'
    )


def _row(entry: Entry) -> dict[str, Any]:
    *place, source = ((name, getattr(entry, name)) for name in BESIDE_TILES)
    return dict([*place, *entry.config.items(), source])


def _lines(lines: Iterable[str]) -> str:
    return ",\n".join(lines)
