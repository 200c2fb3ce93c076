"""Which engines of this user run on this machine, private ones included.

Owns the way to an engine's segments from outside: a named engine has a name in /dev/shm, a
private one can be reached only through the descriptors of its process. Asks no engine
anything. Must not know what the segments say, but for whose they are.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shmllm.errors import IpcError
from shmllm.ipc import layout, registry
from shmllm.ipc.control import ControlView
from shmllm.ipc.layout import SegmentKind
from shmllm.ipc.segment import Segment

PROC = Path("/proc")
# How the kernel shows a segment that was opened by its name, and one that was made without
# a name, also if it was given one later.
_LINK = re.compile(rf".*/(?:{re.escape(registry.PREFIX)}[\w.-]+|#\d+)(?: \(deleted\))?")


Identity = tuple[int, int]


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """An engine that runs.

    Attributes:
        name: None for a private one.
        pid: as seen from here; 0 if its processes cannot be seen from here.
        path: opens its control segment.
        identity: device and inode of that segment, which tell it from every other.
    """

    name: str | None
    pid: int
    path: Path
    identity: Identity

    @property
    def title(self) -> str:
        """What to call it by; also what `shmllm top` takes."""
        return self.name or str(self.pid)

    def open(self) -> Segment:
        """Map its control segment.

        Raises:
            IpcError: it is gone, or of another version.
        """
        return open_segment(self.path, SegmentKind.CONTROL)

    def client_paths(self, proc: Path = PROC) -> list[Path]:
        """What opens the segments of its front ends, in the order they came."""
        if self.pid:
            held = _segments_of(proc / str(self.pid))
            return [path for path, kind in held if kind == SegmentKind.CLIENT]
        return [
            entry.path
            for entry in registry.names(self.path.parent)
            if entry.engine == self.name and entry.place is not None
        ]


def identity_of(path: Path) -> Identity:
    """Of the file that a path leads to; OSError if it is gone."""
    status = path.stat()
    return status.st_dev, status.st_ino


def open_segment(path: Path, kind: SegmentKind) -> Segment:
    """Map a segment.

    Raises:
        IpcError: it is gone, or of another version.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise IpcError(f"cannot open {path}: {error.strerror}") from error
    try:
        return Segment.attach(fd, kind)
    except BaseException:
        os.close(fd)
        raise


def find_engines(proc: Path = PROC, directory: Path = registry.SHM_DIRECTORY) -> list[FoundEngine]:
    """All engines that this user may look at: named ones first, by name; then by pid."""
    named = dict(_named_engines(directory))
    found = dict(named)
    for path, pid in _engine_processes(proc):
        identity = identity_of(path)
        name = named[identity].name if identity in named else None
        found[identity] = FoundEngine(name, pid, path, identity)
    return sorted(found.values(), key=lambda e: (e.name is None, e.name or "", e.pid))


def choose(engines: list[FoundEngine], title: str) -> FoundEngine | None:
    """The engine of that name or pid."""
    return next((e for e in engines if title in (e.name, str(e.pid))), None)


def engine_of_this_process() -> FoundEngine | None:
    """The engine that this process has an `LLM` for; the first one, if there are several."""
    running = {engine.identity: engine for engine in find_engines()}
    for path, kind in _segments_of(PROC / str(os.getpid())):
        if kind == SegmentKind.CONTROL:
            identity = identity_of(path)
            # Its process may be out of sight from here.
            return running.get(identity) or FoundEngine(None, 0, path, identity)
    return None


def _engine_processes(proc: Path) -> Iterator[tuple[Path, int]]:
    """(what opens its control segment, pid) of the processes that are engines."""
    for process in proc.iterdir():
        if not process.name.isdigit():
            continue
        for path, kind in _segments_of(process):
            if kind == SegmentKind.CONTROL and _is_engine_of(path, process):
                yield path, int(process.name)


def _segments_of(process: Path) -> list[tuple[Path, int]]:
    """(what opens it, kind) of the segments that a process holds, each once."""
    found: dict[Identity, tuple[Path, int]] = {}
    try:
        is_ours = process.stat().st_uid == os.geteuid()
        fds = sorted(os.listdir(process / "fd"), key=int) if is_ours else []
    except OSError:  # it ended meanwhile, or may not be looked at
        return []
    for fd in fds:
        path = process / "fd" / fd
        with contextlib.suppress(OSError):
            if not _LINK.fullmatch(os.readlink(path)) or (identity := identity_of(path)) in found:
                continue
            if (kind := _kind_of(path)) is not None:
                found[identity] = path, kind
    return list(found.values())


def _kind_of(path: Path) -> int | None:
    """Of a segment of this version; None if it is anything else. OSError if it is gone."""
    with open(path, "rb", buffering=0) as file:
        header = file.read(layout.CREATOR_PID_NAMESPACE_OFFSET)
    magic, version, kind = (
        int.from_bytes(header[offset : offset + layout.WORD_BYTES], "little")
        for offset in (layout.MAGIC_OFFSET, layout.VERSION_OFFSET, layout.KIND_OFFSET)
    )
    is_ours = (magic, version) == (layout.MAGIC, layout.PROTOCOL_VERSION)
    return kind if is_ours else None


def _is_engine_of(path: Path, process: Path) -> bool:
    """Whether the control segment at `path` says that `process` is its engine."""
    try:
        with open_segment(path, SegmentKind.CONTROL) as control:
            view = ControlView(control)
            pid, namespace = view.engine_pid, view.engine_pid_namespace
            view.close()
        return pid == _own_pid(process) and namespace == (process / "ns" / "pid").stat().st_ino
    except (IpcError, OSError):
        return False


def _own_pid(process: Path) -> int:
    """The pid of a process in its own namespace."""
    for line in (process / "status").read_text(encoding="utf-8").splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return int(process.name)


def _named_engines(directory: Path) -> Iterator[tuple[Identity, FoundEngine]]:
    """Those that have a name here and an owner."""
    for entry in registry.names(directory):
        if entry.place is not None:
            continue
        with contextlib.suppress(IpcError, OSError):
            identity = identity_of(entry.path)
            registry.attach(entry.path, SegmentKind.CONTROL, entry.engine).close()
            yield identity, FoundEngine(entry.engine, 0, entry.path, identity)
