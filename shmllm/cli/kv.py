"""`shmllm kv`: lists and removes the KV blocks that engines share in shared memory."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from shmllm.cli.listing import age, print_records, size

if TYPE_CHECKING:
    from shmllm.shared_kv.collecting import FoundFile

DEFAULT_HOURS = 24.0
START = "shmllm engine start NAME --shared-kv-cache-bytes 1GiB"


@click.group()
def kv() -> None:
    """List the KV blocks that engines share, and free those of engines that have ended.

    An engine with --shared-kv-cache-bytes keeps full KV blocks in a region of shared memory.
    Engines that compute the same, which have the same KEY, read each other's. A region outlives its
    engine: the next one of its KEY takes it over and finds its prefixes.
    """
    from shmllm.sigbus import bus_guard

    bus_guard.install()


@kv.command("ls")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_regions(as_json: bool) -> None:
    """List the regions with their model, dtype, the pid of their engine, how many of their blocks
    have contents, their memory, and how long ago their engine began and a request looked into
    them.

    A region without a pid belongs to an engine that has ended.

    \b
    shmllm kv ls
    shmllm kv ls --json | jq 'map(.bytes) | add'
    """
    from shmllm.shared_kv.collecting import find_files

    files = find_files()
    now = time.time()
    records = [_record(file, now) for file in files]
    if as_json:
        click.echo(json.dumps(records, indent=2))
        return
    if not files:
        click.echo(f"no engine shares KV blocks; start one that does: {START}", err=True)
        return
    rows = [_row(record) for record in records]
    columns = [name for name in rows[0] if name != "states" or any(row["states"] for row in rows)]
    print_records(columns, rows, shrinking=("model", "dtype"))
    click.echo(_total(files))
    for file in files:
        if file.problem:
            kind = "foreign" if file.is_foreign else "damaged"
            click.echo(f"{file.path} is {kind}: {file.problem}", err=True)


@kv.command()
@click.option(
    "--older-than",
    "hours",
    type=click.FloatRange(min=0),
    default=DEFAULT_HOURS,
    show_default=True,
    metavar="HOURS",
    help="How long no engine has used the regions of a KEY.",
)
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
def gc(hours: float, dry_run: bool) -> None:
    """Remove regions that no engine uses any more, and damaged ones.

    These are the regions of a KEY without a living engine, if no request has looked into any of
    them for HOURS. Others stay, so that an engine that is started again finds its prefixes.
    Engines need no gc to get memory: one that finds none removes regions of other KEYs whose
    engines have ended, those first that were used longest ago.

    \b
    shmllm kv gc --dry-run
    shmllm kv gc --older-than 1
    """
    from shmllm.shared_kv.collecting import find_files, remove_empty_folders, unused_files

    files = find_files()
    found = unused_files(files, 3600 * hours)
    if dry_run:
        for file in found:
            click.echo(f"would remove {_words(file)}")
        told = f"nothing was removed; it would free {size(_sum(found))}"
        click.echo(told if found else "nothing to remove", err=True)
        return
    _remove(found)
    remove_empty_folders()
    left = [file for file in files if file.is_collectable and file not in found]
    if left:
        click.echo(
            f"{_count(left)} of engines that have ended, {size(_sum(left))}, used more recently, "
            "stay; to remove them: shmllm kv clear",
            err=True,
        )


@kv.command()
@click.argument("which", required=False, metavar="[KEY|MODEL]")
def clear(which: str | None) -> None:
    """Remove all regions of engines that have ended, however recently they were used.

    With KEY, or MODEL (the name or the directory, as in `shmllm kv ls`), only theirs. Regions of
    living engines stay: `shmllm engine stop` ends an engine, and `shmllm engine sleep` frees its
    region. Engines started later compute their prefixes again.

    \b
    shmllm kv clear
    shmllm kv clear smollm2
    """
    from shmllm.errors import SegmentError
    from shmllm.shared_kv.collecting import find_files, remove_empty_folders

    files = [file for file in find_files() if which is None or file.is_of(which)]
    if which is not None and not files:
        raise SegmentError(f"no region has the key or the model {which!r}; see: shmllm kv ls")
    _remove([file for file in files if file.is_collectable])
    remove_empty_folders()
    names = _names_of_engines() if any(file.is_owned for file in files) else {}
    for file in files:
        if file.is_owned:
            name = names.get(file.pid or 0)
            end = f"shmllm engine stop {name}" if name else "end that process"
            pid = "" if file.pid is None else f", pid {file.pid}"
            click.echo(f"kept {_words(file)}: its engine lives{pid}; to free it: {end}", err=True)


def _remove(files: Iterable[FoundFile]) -> None:
    """Remove files, and say which, and how much memory they had."""
    from shmllm.shared_kv.collecting import remove_files

    removed = []
    for file, is_gone in remove_files(files):
        if is_gone:
            removed.append(file)
            click.echo(f"removed {_words(file)}")
        else:
            click.echo(f"kept {_words(file)}: a process uses it now", err=True)
    if removed:
        click.echo(f"{_count(removed)} removed, {size(_sum(removed))} freed", err=True)
    else:
        click.echo("nothing to remove", err=True)


def _names_of_engines() -> dict[int, str]:
    """The names of the named engines, by pid."""
    from shmllm.monitor.find import named_engines

    return {each.pid: each.name for each in named_engines() if each.name and each.pid}


def _record(file: FoundFile, now: float) -> dict[str, Any]:
    """One object of `ls --json`."""
    began = file.began_s
    blocks, states = (*file.num_blocks, 0, 0)[:2] if file.num_blocks else (None, None)
    readable, kept = (*file.num_readable, 0, 0)[:2] if file.num_readable else (None, None)
    return {
        "key": file.key,
        "place": file.path.name,
        "path": str(file.path),
        "state": _state(file),
        "pid": file.pid,
        "model": file.text("name"),
        "model_directory": file.text("model"),
        "dtype": file.text("dtype"),
        "kv_cache_dtype": file.text("kv_cache_dtype"),
        "quantization": file.text("quantization"),
        "blocks": readable,
        "blocks_total": blocks,
        "states": kept,
        "states_total": states,
        "bytes": file.num_bytes,
        "age_s": None if began is None else max(now - began, 0.0),
        "unused_s": max(now - file.used_s, 0.0),
        "problem": file.problem or None,
    }


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    """One line of `ls`, from its record."""
    dtype, kept = record["dtype"], record["kv_cache_dtype"]
    has_states = record["states_total"]
    return {
        "key": record["key"],
        "place": record["place"],
        "model": record["model"],
        "dtype": f"{dtype}/{kept}" if kept and kept != dtype else dtype,
        "state": record["state"],
        "pid": record["pid"],
        "blocks": _of(record["blocks"], record["blocks_total"]),
        "states": _of(record["states"], record["states_total"]) if has_states else None,
        "size": size(record["bytes"]),
        "age": None if record["age_s"] is None else age(record["age_s"]),
        "used": f"{age(record['unused_s'])} ago",
    }


def _state(file: FoundFile) -> str:
    if file.is_foreign:
        return "foreign"
    if file.problem:
        return "damaged"
    return "in use" if file.is_owned else "ended"


def _of(part: int | None, whole: int | None) -> str | None:
    return None if part is None else f"{part:,} / {whole:,}"


def _total(files: list[FoundFile]) -> str:
    """The last line of `ls`."""
    ended = [file for file in files if not file.is_owned]
    text = f"{_count(files)}, {size(_sum(files))}"
    return f"{text}; {size(_sum(ended))} of it without a living engine" if ended else text


def _count(files: list[FoundFile]) -> str:
    return f"{len(files)} region" + ("" if len(files) == 1 else "s")


def _sum(files: Iterable[FoundFile]) -> int:
    return sum(file.num_bytes for file in files)


def _words(file: FoundFile) -> str:
    """A region in a line about it."""
    what = "damaged" if file.problem else file.text("name") or "of an unknown model"
    return f"{file.title} ({what}, {size(file.num_bytes)})"
