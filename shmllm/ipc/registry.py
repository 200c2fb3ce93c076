"""Names of segments in /dev/shm.

    /dev/shm/shmllm.NAME      the control segment of engine NAME
    /dev/shm/shmllm.NAME.k    the segment of its client (front end) in place k

This module publishes segments under names, attaches to named segments, and removes names. A
process links a segment only after it has locked and initialised it, so every process that opens
a name finds a locked and initialised segment. A name is removed by its owner, or by a sweeper
that found the owner's lock free and holds the sweepers' lock. Both remove it only while it still
leads to the same file. Therefore the name of a live owner is never removed, and a name never has
two owners.
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
    """A name of a segment in the directory.

    Attributes:
        path: the path of the file.
        engine: the name of the engine.
        place: the place of the client; None for the engine's control segment.
    """

    path: Path
    engine: str
    place: int | None

    @property
    def kind(self) -> SegmentKind:
        return SegmentKind.CONTROL if self.place is None else SegmentKind.CLIENT


def control_path(name: str, directory: Path = SHM_DIRECTORY) -> Path:
    """The path of the control segment of engine `name`.

    Raises:
        SegmentError: `name` is not valid as a name of an engine.
    """
    if not _NAME.fullmatch(name):
        raise SegmentError(
            f"an engine's name has 1 to 64 letters, digits, '-' and '_', got {name!r}"
        )
    return directory / f"{PREFIX}{name}"


def client_path(name: str, place: int, directory: Path = SHM_DIRECTORY) -> Path:
    """The path of the segment of the client in `place` at engine `name`."""
    return directory / f"{control_path(name).name}.{place}"


def names(directory: Path = SHM_DIRECTORY) -> list[NamedSegment]:
    """All names of shmllm segments in the directory, sorted; their owners may be dead."""
    found = []
    for entry in sorted(os.listdir(directory)):
        match = _PATTERN.fullmatch(entry)
        if match:
            place = None if match[2] is None else int(match[2])
            found.append(NamedSegment(directory / entry, match[1], place))
    return found


def publish(segment: Segment, path: Path) -> bool:
    """Link an owned and initialised segment under a name. If the name belongs to a dead segment,
    remove it first.

    Returns:
        False if the name belongs to a live segment.
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
    # Python calls linkat(2) only with a directory descriptor, and only linkat can follow the
    # symbolic link in /proc/self/fd to the unnamed file.
    descriptors = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.link(str(segment.fd), path, src_dir_fd=descriptors, follow_symlinks=True)
    finally:
        os.close(descriptors)


def withdraw(segment: Segment, path: Path) -> None:
    """Remove the name of a segment that this process owns. While the owner holds its lock, no
    other process removes the name, so the check and the removal need no further lock."""
    try:
        if os.path.samestat(os.fstat(segment.fd), os.stat(path)):
            os.unlink(path)
    except FileNotFoundError:
        pass


def sweep(path: Path) -> bool:
    """Remove a name whose owner is dead.

    The owner locks the owner byte before it links the name, so the byte stays free once it is
    free. Sweepers only test that byte, and exclude each other by a lock on another byte. If a
    sweeper locked the owner byte, the dead segment would look alive during that time.

    Returns:
        Whether the name is free now.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:
        return False  # a symbolic link, a directory or another user's file
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
        path: the path of the segment.
        kind: the expected kind.
        what: the subject of error messages, for example "engine 'x'".

    Raises:
        SegmentError: the segment does not exist, belongs to another user, or its owner is dead.
        ProtocolMismatchError: the segment has another kind or version.
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
    """Link a client's segment under the first free place of an engine. Two clients cannot get
    the same place, because the kernel lets only one of them link the name.

    Returns:
        The place.

    Raises:
        SegmentError: all places are taken.
    """
    for place in range(NUM_CLIENTS):
        if publish(segment, client_path(name, place, directory)):
            return place
    raise SegmentError(f"engine {name!r} has {NUM_CLIENTS} clients, which is the most it takes")
