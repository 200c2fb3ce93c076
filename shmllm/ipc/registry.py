"""Names of engines and of their clients' segments.

    /dev/shm/shmllm.NAME      the control segment of engine NAME
    /dev/shm/shmllm.NAME.k    the segment of its client in place k

Owns names: giving one to a finished segment, finding what a name means, taking names away
from what is dead. A name is given by linking a segment that is locked and initialised, so
whoever can open a name finds both done. A name is taken away by its owner, or by a sweeper
that found the owner's lock free and holds the sweepers' own, and only while it still names
the same file; so a live name is never removed and no two owners ever share one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from dataclasses import dataclass
from pathlib import Path

from shmllm.errors import SegmentError
from shmllm.ipc.layout import NUM_CLIENTS, SegmentKind
from shmllm.ipc.segment import SWEEPER_BYTE, Segment, is_locked, write_lock

SHM_DIRECTORY = Path("/dev/shm")
PREFIX = "shmllm."
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PATTERN = re.compile(rf"{re.escape(PREFIX)}([A-Za-z0-9_-]{{1,64}})(?:\.(\d+))?")


@dataclass(frozen=True, slots=True)
class NamedSegment:
    """A name in the directory.

    Attributes:
        engine: name of the engine.
        place: of the client; None for the engine's own control segment.
    """

    path: Path
    engine: str
    place: int | None

    @property
    def kind(self) -> SegmentKind:
        return SegmentKind.CONTROL if self.place is None else SegmentKind.CLIENT


def control_path(name: str, directory: Path = SHM_DIRECTORY) -> Path:
    """Where engine `name` is found.

    Raises:
        SegmentError: no such name is possible.
    """
    if not _NAME.fullmatch(name):
        raise SegmentError(
            f"an engine's name has 1 to 64 letters, digits, '-' and '_', got {name!r}"
        )
    return directory / f"{PREFIX}{name}"


def client_path(name: str, place: int, directory: Path = SHM_DIRECTORY) -> Path:
    """Where the client in `place` of engine `name` is found."""
    return directory / f"{control_path(name).name}.{place}"


def names(directory: Path = SHM_DIRECTORY) -> list[NamedSegment]:
    """All names of ours in the directory, live or dead, sorted."""
    found = []
    for entry in sorted(os.listdir(directory)):
        match = _PATTERN.fullmatch(entry)
        if match:
            place = None if match[2] is None else int(match[2])
            found.append(NamedSegment(directory / entry, match[1], place))
    return found


def publish(segment: Segment, path: Path) -> bool:
    """Give an owned, initialised segment its name, sweeping a dead bearer of it first.

    Returns:
        False if a live segment bears the name.
    """
    while True:
        try:
            _link(segment, path)
            return True
        except FileExistsError:
            if not sweep(path):
                return False
        except OSError as error:
            raise SegmentError(f"cannot link {path}: {error.strerror}") from error


def _link(segment: Segment, path: Path) -> None:
    # With a directory descriptor Python calls linkat, which alone can follow this link.
    descriptors = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.link(str(segment.fd), path, src_dir_fd=descriptors, follow_symlinks=True)
    finally:
        os.close(descriptors)


def withdraw(segment: Segment, path: Path) -> None:
    """The owner takes its own name away. Nobody else can have: that takes the lock."""
    try:
        if os.path.samestat(os.fstat(segment.fd), os.stat(path)):
            os.unlink(path)
    except FileNotFoundError:
        pass


def sweep(path: Path) -> bool:
    """Remove a name whose owner is dead. True if the name is free now.

    The owner locks one byte before it gives the name, so that byte, once free, stays free;
    sweepers only look at it and exclude each other with another byte. Were they to lock the
    owner's, a dead segment would look alive for that moment.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:
        return False  # a link, a directory, another user's: not ours to remove
    try:
        if is_locked(fd):
            return False
        fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, write_lock(SWEEPER_BYTE))
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            os.unlink(path)
    except FileNotFoundError:
        pass
    finally:
        os.close(fd)
    return True


def attach(path: Path, kind: SegmentKind, what: str) -> Segment:
    """Map a named segment of this user.

    Args:
        path: its name.
        kind: what it has to be.
        what: how to call it in an error: "engine 'x'".

    Raises:
        SegmentError: absent, of another user, or its owner is dead.
        ProtocolMismatchError: of another version.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise SegmentError(f"{what} is not running: there is no {path}") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise SegmentError(f"{what}: {path} is no segment but a link or directory") from error
        owner = os.lstat(path).st_uid
        raise SegmentError(
            f"{what} belongs to user {owner} and this process is user {os.geteuid()}: "
            f"{error.strerror}"
        ) from error
    try:
        segment = Segment.attach(fd, kind)
    except BaseException:
        os.close(fd)
        raise
    if not segment.is_owned():
        segment.close()
        raise SegmentError(
            f"{what} is dead, only its segment {path} is left; remove it with: shmllm ipc gc"
        )
    return segment


def claim_place(segment: Segment, name: str, directory: Path = SHM_DIRECTORY) -> int:
    """Name a client's segment after the first free place of an engine: linking is the
    compare-and-swap.

    Raises:
        SegmentError: all places are taken.
    """
    for place in range(NUM_CLIENTS):
        if publish(segment, client_path(name, place, directory)):
            return place
    raise SegmentError(f"engine {name!r} has {NUM_CLIENTS} clients, which is the most it takes")
