"""Finds the running engines of this user on this machine, including private ones.

This module opens an engine's segments from another process. A named engine has a name in
this user's folder; a private engine is reachable only through the file descriptors of its process
in /proc.
It sends the engine nothing. Of the contents of a segment, it reads only the header and the
engine's pid.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shmllm.errors import IpcError
from shmllm.ipc import folder, layout, registry
from shmllm.ipc.access import Access
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import SegmentKind

PROC = Path("/proc")
# The targets of /proc/PID/fd/N for a segment that the process opened by its name, and for one that
# it created without a name (even if the segment got a name later).
_LINK = re.compile(rf".*/(?:{folder.NAME_PATTERN}/[\w.-]+|#\d+)(?: \(deleted\))?")


Identity = tuple[int, int]


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """A running engine.

    Attributes:
        name: the engine's name; None for a private engine.
        pid: the pid of its process in this pid namespace; 0 if this process cannot see it.
        path: a path that opens its control segment.
        identity: the device and inode of that segment, which identify the engine.
    """

    name: str | None
    pid: int
    path: Path
    identity: Identity

    @property
    def title(self) -> str:
        """The engine's name, or the pid of a private engine; `shmllm top` accepts both."""
        return self.name or str(self.pid)

    def open(self) -> Segment:
        """Map the engine's control segment.

        Raises:
            IpcError: the engine has ended, or has another version.
        """
        return open_segment(self.path, SegmentKind.CONTROL)

    def client_paths(self, proc: Path = PROC) -> list[Path]:
        """Paths that open the segments of the engine's front ends, in the order of their
        descriptors in the engine process, or of their places if that process is not visible."""
        if self.pid:
            held = _segments_of(proc / str(self.pid))
            return _without_bells([path for path, kind in held if kind == SegmentKind.CLIENT])
        return [
            entry.path
            for entry in registry.names(self.path.parent)
            if entry.engine == self.name and entry.place is not None
        ]


def identity_of(path: Path) -> Identity:
    """The identity of the file at a path; OSError if it does not exist."""
    status = path.stat()
    return status.st_dev, status.st_ino


def open_segment(path: Path, kind: SegmentKind) -> Segment:
    """Map the segment that a path opens.

    Raises:
        IpcError: the path does not exist, or the segment has another version.
    """
    try:
        # The path may be a link in /proc.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise IpcError(f"cannot open {path}: {error.strerror}") from error
    try:
        return Segment.attach(fd, kind, Access.READER)
    except BaseException:
        os.close(fd)
        raise


def find_engines(proc: Path = PROC, directory: Path | None = None) -> list[FoundEngine]:
    """All engines that this user may read: the named ones by name, then the private ones by pid.

    Args:
        proc: the directory of the processes.
        directory: the directory of the names; None for this user's folders.
    """
    named = dict(_named_engines(directory))
    found = dict(named)
    for path, pid in _engine_processes(proc):
        identity = identity_of(path)
        name = named[identity].name if identity in named else None
        found[identity] = FoundEngine(name, pid, path, identity)
    return sorted(found.values(), key=lambda e: (e.name is None, e.name or "", e.pid))


def named_engines() -> list[FoundEngine]:
    """The engines with a name, by name, and dead ones whose segment is left."""
    running = {engine.identity: engine for engine in find_engines()}
    found = []
    for entry in registry.names():
        if entry.place is None:
            with contextlib.suppress(OSError):
                identity = identity_of(entry.path)
                dead = FoundEngine(entry.engine, 0, entry.path, identity)
                found.append(running.get(identity, dead))
    return sorted(found, key=lambda engine: engine.title)


def choose(engines: list[FoundEngine], title: str) -> FoundEngine | None:
    """The engine with this name or pid; None if it is not in the list."""
    return next((e for e in engines if title in (e.name, str(e.pid))), None)


def engine_of_this_process() -> FoundEngine | None:
    """The engine of this process's `LLM`; the first one if there are several."""
    running = {engine.identity: engine for engine in find_engines()}
    for path, kind in _segments_of(PROC / str(os.getpid())):
        if kind == SegmentKind.CONTROL:
            identity = identity_of(path)
            # This process may not be able to see the engine process.
            return running.get(identity) or FoundEngine(None, 0, path, identity)
    return None


def _engine_processes(proc: Path) -> Iterator[tuple[Path, int]]:
    """(path of the control segment, pid) for each process that is an engine."""
    for process in proc.iterdir():
        if not process.name.isdigit():
            continue
        for path, kind in _segments_of(process):
            if kind == SegmentKind.CONTROL and _is_engine_of(path, process):
                yield path, int(process.name)


def _segments_of(process: Path) -> list[tuple[Path, int]]:
    """(path, kind) of each segment that a process has open, without duplicates."""
    found: dict[Identity, tuple[Path, int]] = {}
    try:
        is_ours = process.stat().st_uid == os.geteuid()
        fds = sorted(os.listdir(process / "fd"), key=int) if is_ours else []
    except OSError:  # the process has ended, or may not be read
        return []
    for fd in fds:
        path = process / "fd" / fd
        with contextlib.suppress(OSError):
            if not _LINK.fullmatch(os.readlink(path)) or (identity := identity_of(path)) in found:
                continue
            if (kind := _kind_of(path)) is not None:
                found[identity] = path, kind
    return list(found.values())


def _without_bells(paths: list[Path]) -> list[Path]:
    """The paths of CLIENT segments, without those that an engine has open only because another
    one's front end waits on their doorbells."""
    nonces: dict[int, Path] = {}
    bells: set[int] = set()
    for path in paths:
        with contextlib.suppress(OSError):
            nonce, bell = _words_at(path, layout.NONCE_OFFSET, layout.CLIENT_BELL_OFFSET)
            nonces[nonce] = path
            bells.add(bell)
    return [path for nonce, path in nonces.items() if nonce not in bells]


def _kind_of(path: Path) -> int | None:
    """The kind of the segment at a path; None if the file is no segment of this version. OSError
    if it does not exist."""
    magic, version, kind = _words_at(
        path, layout.MAGIC_OFFSET, layout.VERSION_OFFSET, layout.KIND_OFFSET
    )
    is_ours = (magic, version) == (layout.MAGIC, layout.PROTOCOL_VERSION)
    return kind if is_ours else None


def _words_at(path: Path, *offsets: int) -> list[int]:
    """Words of the file at a path; 0 behind its end. OSError if it does not exist.

    The file may belong to any program, and may be truncated at any time. So it is not mapped.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        words = [os.pread(fd, layout.WORD_BYTES, offset) for offset in offsets]
    finally:
        os.close(fd)
    return [int.from_bytes(word, "little") for word in words]


def _is_engine_of(path: Path, process: Path) -> bool:
    """Whether the control segment at `path` names `process` as its engine process."""
    try:
        pid, namespace = _words_at(
            path, layout.CONTROL_ENGINE_PID_OFFSET, layout.CONTROL_ENGINE_PID_NS_OFFSET
        )
        return pid == _own_pid(process) and namespace == (process / "ns" / "pid").stat().st_ino
    except OSError:
        return False


def _own_pid(process: Path) -> int:
    """The pid of a process in its own pid namespace."""
    for line in (process / "status").read_text(encoding="utf-8").splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return int(process.name)


def _named_engines(directory: Path | None) -> Iterator[tuple[Identity, FoundEngine]]:
    """The engines with a name in the directory and a living owner."""
    for entry in registry.names(directory):
        if entry.place is not None:
            continue
        with contextlib.suppress(IpcError, OSError):
            identity = identity_of(entry.path)
            registry.attach(entry.path, SegmentKind.CONTROL, entry.engine).close()
            yield identity, FoundEngine(entry.engine, 0, entry.path, identity)
