"""`shmllm ipc`: lists, inspects and removes shmllm's segments in shared memory."""

from __future__ import annotations

import json
import os
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from shmllm.cli.listing import age, print_records, size

if TYPE_CHECKING:
    from shmllm.ipc.registry import NamedSegment
    from shmllm.ipc.segment import Segment
    from shmllm.ipc.slot_state import LoanedSlot

DEFAULT_RECORDS = 8


@click.group()
def ipc() -> None:
    """List and inspect shared memory segments, and remove those of dead processes."""
    from shmllm.sigbus import bus_guard

    bus_guard.install()


@ipc.command("ls")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_segments(as_json: bool) -> None:
    """List named segments with their owner, size and age, and the state of each front end: idle,
    active, hung or stopped, with the usage of its rings and its number of loaned slots. A last line
    says how much memory shared KV caches have, which `shmllm kv ls` lists."""
    from shmllm.ipc import registry
    from shmllm.shared_kv.collecting import used_bytes

    records = [describe(entry) for entry in registry.names()]
    if as_json:
        click.echo(json.dumps(records, indent=2))
    elif records:
        columns = (
            *("name", "owner", "pid", "bytes", "age"),
            *("state", "requests", "outputs", "slots"),
        )
        print_records(columns, records)
    else:
        click.echo("no named segment exists; private engines create none", err=True)
    if not as_json and (num_bytes := used_bytes()):
        click.echo(f"shared KV caches have {size(num_bytes)}; see: shmllm kv ls", err=True)


@ipc.command()
@click.option("--yes", is_flag=True, help="Remove them; without it, only list them.")
def gc(yes: bool) -> None:
    """Remove segments whose owner is dead. Segments with a living owner stay."""
    from shmllm.errors import SegmentError
    from shmllm.ipc import registry

    num_dead = 0
    for path in (entry.path for entry in registry.names()):
        try:
            if registry.is_owned(path):
                continue
        except SegmentError as error:
            click.echo(f"kept {error}", err=True)
            continue
        num_dead += 1
        if not yes:
            click.echo(f"would remove {path}")
        elif registry.sweep(path):
            click.echo(f"removed {path}")
        else:
            click.echo(f"kept {path}: a process uses it now", err=True)
    if not num_dead:
        click.echo("nothing to remove", err=True)
    elif not yes:
        click.echo("nothing was removed; to remove them: shmllm ipc gc --yes", err=True)


@ipc.command()
@click.argument("name")
@click.option(
    "--records", default=DEFAULT_RECORDS, show_default=True, help="Latest records to show per ring."
)
def inspect(name: str, records: int) -> None:
    """Show the contents of segment NAME.

    For an engine: its state, statistics, errors and last words. For a front end (NAME.PLACE): its
    state, the slots that are not free, and cursors, counters and the latest records of its rings.
    The owner may be dead. Records that were already read are shown until they are overwritten.
    """
    from shmllm.errors import SegmentError
    from shmllm.ipc import registry

    entry = next((e for e in registry.names() if e.path.name == name), None)
    if entry is None:
        raise SegmentError(f"no segment {name!r}; see: shmllm ipc ls")
    with open_segment(entry) as segment:
        found = contents(segment, records, engine_pid(entry))
        segment.check_intact(str(entry.path))
        for key, value in found.items():
            if isinstance(value, list):
                click.echo(f"{key}:")
                for item in value:
                    click.echo(f"  {item}")
            else:
                click.echo(f"{key}: {value}")


def open_segment(entry: NamedSegment) -> Segment:
    """Maps a segment, with or without a living owner."""
    from shmllm.ipc import registry
    from shmllm.ipc.access import Access
    from shmllm.ipc.segment import Segment

    fd = registry.open_name(entry.path, Access.READER)
    try:
        return Segment.attach(fd, entry.kind, Access.READER)
    except BaseException:
        os.close(fd)
        raise


def describe(entry: NamedSegment) -> dict[str, Any]:
    """One row of `ls`."""
    from shmllm.errors import IpcError
    from shmllm.ipc.client_state import client_state
    from shmllm.ipc.layout import OUTPUT_RING_LAYOUT, REQUEST_RING_LAYOUT
    from shmllm.ipc.ring_state import peek
    from shmllm.ipc.states import SegmentKind

    record: dict[str, Any] = {"name": entry.path.name}
    try:
        status = entry.path.stat()
        record |= {"bytes": status.st_blocks * 512, "age": age(time.time() - status.st_ctime)}
        with open_segment(entry) as segment:
            owned = segment.is_owned()
            record |= {"owner": "alive" if owned else "dead", "pid": segment.creator_pid}
            if entry.kind is SegmentKind.CLIENT:
                for key, layout in (
                    ("requests", REQUEST_RING_LAYOUT),
                    ("outputs", OUTPUT_RING_LAYOUT),
                ):
                    ring = peek(segment.buffer, layout, 0)
                    record[key] = f"{100 * ring.used_bytes / layout.capacity_bytes:.0f}%"
                record["slots"] = len(loans(segment))
                if owned:
                    record["state"] = client_state(segment)
            segment.check_intact(str(entry.path))
    except (IpcError, OSError) as error:
        record["owner"] = f"unreadable ({error})"
    return record


def loans(segment: Segment) -> list[tuple[str, LoanedSlot]]:
    """(direction, slot) of each slot of a front end's segment that is not free."""
    from shmllm.ipc.layout import OUTPUT_SLOT_LAYOUT, REQUEST_SLOT_LAYOUT
    from shmllm.ipc.slot_state import loaned_slots

    layouts = {"request": REQUEST_SLOT_LAYOUT, "output": OUTPUT_SLOT_LAYOUT}
    return [
        (direction, slot)
        for direction, layout in layouts.items()
        for slot in loaned_slots(segment.buffer, layout)
    ]


def engine_pid(entry: NamedSegment) -> int:
    """The pid of the engine to which a segment belongs, in its own pid namespace; 0 if the
    engine's segment is gone."""
    from shmllm.errors import IpcError
    from shmllm.ipc import registry
    from shmllm.ipc.control import ControlView

    path = registry.control_path(entry.engine, entry.path.parent)
    try:
        with (
            open_segment(registry.NamedSegment(path, entry.engine, None)) as control,
            closing(ControlView(control)) as view,
        ):
            return view.engine_pid
    except (IpcError, OSError):
        return 0


def contents(segment: Segment, num_records: int, engine: int) -> dict[str, Any]:
    """The values that `inspect` shows, by label; a list is shown as one line per item.

    Args:
        segment: the segment.
        num_records: the largest number of records to show per ring.
        engine: the pid of its engine; 0 if it is not known.
    """
    from shmllm.ipc.client_state import client_state
    from shmllm.ipc.control import ControlView
    from shmllm.ipc.layout import OUTPUT_RING_LAYOUT, REQUEST_RING_LAYOUT
    from shmllm.ipc.ring_state import peek
    from shmllm.ipc.states import SegmentKind
    from shmllm.wire.messages import RecordKind

    found: dict[str, Any] = {
        "kind": segment.kind.name,
        "owner": "alive" if segment.is_owned() else "dead",
        "creator pid": segment.creator_pid,
    }
    if segment.kind is SegmentKind.CONTROL:
        view = ControlView(segment)
        found |= {"state": view.engine_state.name, "heartbeat": _since(view.heartbeat_ns)}
        found["model"] = view.model() or "not known yet"
        found["device"] = view.device() or "not known yet"
        found["precision"] = view.precision() or "not known yet"
        found["speculation"] = view.speculation() or "none"
        found |= view.stats()
        found["errors"] = [
            f"{local_time(e.last_ns)}, {e.count} times: {e.text}" for e in view.errors()
        ] or "none"
        found["last words"] = view.last_words().splitlines() or "none"
        view.close()
        return found
    if segment.is_owned():
        found["state"] = client_state(segment)
    ends = f"front end {segment.creator_pid}", f"engine {engine or 'of unknown pid'}"
    writers = {"request": ends, "output": ends[::-1]}
    found["loaned slots"] = [
        _loan(direction, slot, *writers[direction]) for direction, slot in loans(segment)
    ] or "none"
    for name, layout in (("requests", REQUEST_RING_LAYOUT), ("outputs", OUTPUT_RING_LAYOUT)):
        state = peek(segment.buffer, layout, num_records)
        found[f"{name} published"] = state.published
        found[f"{name} consumed"] = state.consumed
        found[f"{name} unread"] = f"{state.used_bytes} of {layout.capacity_bytes} bytes"
        known = {kind.value: kind.name for kind in RecordKind}
        for end, counted in (("writer", state.writer), ("reader", state.reader)):
            found[f"{name} {end}"] = ", ".join(
                f"{key.removeprefix('num_').replace('_', ' ')} {value}"
                for key, value in counted._asdict().items()
                if value or key == "num_messages"
            )
        found[f"{name} records"] = [
            f"position {r.position}: {known.get(r.kind, r.kind)}, {r.length} bytes, "
            + ("read" if r.position < state.consumed else "unread")
            for r in state.records
        ]
    return found


def _loan(direction: str, slot: LoanedSlot, writer: str, reader: str) -> str:
    """A line about a slot that is not free."""
    if slot.is_published:
        kind, size, holder = "published, not released", f"{slot.nbytes} bytes", reader
    else:
        kind, size, holder = "claimed", f"up to {slot.nbytes} bytes", writer
    since_s = max(0.0, (time.monotonic_ns() - slot.since_ns) / 1e9)
    return f"{direction} slot {slot.index}: {kind}, {size}, held by {holder} for {since_s:.1f} s"


def local_time(time_ns: int) -> str:
    """A time in ns since 1970 as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ns / 1e9))


def _since(heartbeat_ns: int) -> str:
    if not heartbeat_ns:
        return "never"
    return f"{(time.monotonic_ns() - heartbeat_ns) / 1e9:.1f} s ago"
