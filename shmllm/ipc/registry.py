"""Names of segments in the folder of this user in /dev/shm.

    /dev/shm/shmllm-UID/NAME      the control segment of engine NAME
    /dev/shm/shmllm-UID/NAME.k    the segment of its client (front end) in place k

This module publishes segments under names, attaches to named segments, and removes names. No other
user can enter the folder (`folder.py`). A process links a segment only after it has locked and
initialised it, so every process that opens a name finds a locked and initialised segment. A name
is removed by its owner, or by a sweeper that found the owner's lock free and holds the sweepers'
lock. Both remove it only while it still leads to the same file. Therefore the name of a live owner
is never removed, and a name never has two owners.

A user has several folders if another user took the name of the first one for a while. Then all of
them count: a name that exists is used where it is, and `publish` refuses a name that has a live
owner in another folder. The clients of an engine use the folder of the engine.

Functions that accept a directory use only that directory, which must have the mode 0700. None
stands for the folders of this user in /dev/shm.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shmllm.errors import SegmentError
from shmllm.ipc import folder
from shmllm.ipc.access import Access
from shmllm.ipc.layout import NUM_CLIENTS
from shmllm.ipc.segment import SWEEPER_BYTE, Segment, is_locked, write_lock
from shmllm.ipc.states import SegmentKind

SHM_DIRECTORY = Path("/dev/shm")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ENTRY = re.compile(r"([A-Za-z0-9_-]{1,64})(?:\.(\d+))?")
_LOCK_TRIES = 100
_LOCK_PAUSE_S = 0.001


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


def control_path(name: str, directory: Path | None = None) -> Path:
    """The path of the control segment of engine `name`: where the name has a live owner, else
    where it exists, else in the first folder of this user, which is created if it is missing.

    Raises:
        SegmentError: `name` is not valid as a name of an engine, or the folder cannot be created.
    """
    if not _NAME.fullmatch(name):
        raise SegmentError(
            f"an engine's name has 1 to 64 letters, digits, '-' and '_', got {name!r}"
        )
    if directory is not None:
        return directory / name
    paths = [path for path in _everywhere(name) if os.path.lexists(path)]
    live = (path for path in paths if _is_live(path))
    return next(live, None) or next(iter(paths), None) or folder.make(SHM_DIRECTORY) / name


def client_path(name: str, place: int, directory: Path | None = None) -> Path:
    """The path of the segment of the client in `place` at engine `name`."""
    path = control_path(name, directory)
    return path.with_name(f"{path.name}.{place}")


def client_path_named(name: str, directory: Path) -> Path:
    """The path of a client's segment by its file's name in a folder.

    Raises:
        SegmentError: it is no name of a client's segment.
    """
    match = _ENTRY.fullmatch(name)
    if match is None or match[2] is None:
        raise SegmentError(f"{name!r} is no name of a client's segment")
    return directory / name


def names(directory: Path | None = None) -> list[NamedSegment]:
    """All names of segments, sorted; their owners may be dead."""
    found = []
    for each in _directories(directory):
        with suppress(FileNotFoundError):
            for entry in folder.list_names(each):
                if match := _ENTRY.fullmatch(entry):
                    place = None if match[2] is None else int(match[2])
                    found.append(NamedSegment(each / entry, match[1], place))
    return found


def publish(segment: Segment, path: Path) -> bool:
    """Link an owned and initialised segment under a name. If the name belongs to a dead segment,
    remove it first.

    Returns:
        False if the name belongs to a live segment. The kernel may refuse to link the segment
        again after that.

    Raises:
        SegmentError: the folder does not exist, or other users may use it.
    """
    if not _publish_in_folder(segment, path):
        return False
    # Two processes may link the name in two folders at once. Each looks after it has linked, so
    # at least one of them finds the other.
    if path.parent in _directories() and any(
        _is_live(other) for other in _everywhere(path.name) if other != path
    ):
        withdraw(segment, path)
        return False
    return True


def _publish_in_folder(segment: Segment, path: Path) -> bool:
    while not _try_link(segment, path):
        if not sweep(path):
            return False
    return True


def _directories(directory: Path | None = None) -> list[Path]:
    return folder.find(SHM_DIRECTORY) if directory is None else [directory]


def _everywhere(entry: str) -> list[Path]:
    return [each / entry for each in _directories()]


def _is_live(path: Path) -> bool:
    try:
        return is_owned(path)
    except SegmentError:
        return False


def _try_link(segment: Segment, path: Path) -> bool:
    """Link the segment; False if the name exists."""
    try:
        folder.link(segment.fd, path)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        raise SegmentError(f"cannot link {path}: {error.strerror}") from error


def withdraw(segment: Segment, path: Path) -> None:
    """Remove the name of a segment that this process owns. While the owner holds its lock, no
    other process removes the name, so the check and the removal need no further lock."""
    with suppress(FileNotFoundError, SegmentError):
        _unlink_if_same(segment.fd, path)


def _unlink_if_same(fd: int, path: Path) -> None:
    with folder.opened(path.parent) as directory:
        status = os.stat(path.name, dir_fd=directory, follow_symlinks=False)
        if os.path.samestat(os.fstat(fd), status):
            os.unlink(path.name, dir_fd=directory)


def sweep(path: Path) -> bool:
    """Remove a name whose owner is dead.

    The owner locks the owner byte before it links the name, so the byte stays free once it is
    free. Sweepers only test that byte, and exclude each other by a lock on another byte. If a
    sweeper locked the owner byte, the dead segment would look alive during that time.

    Returns:
        Whether the name is free now. It is not free if it leads to something that is no file of
        this user, or if another sweeper is stopped while it removes the name.
    """
    try:
        with _opened(path) as fd:
            if is_locked(fd) or not _lock_for_sweep(fd):
                return False
            _unlink_if_same(fd, path)
    except FileNotFoundError:
        return True
    except (SegmentError, OSError):
        return False
    return True


def _lock_for_sweep(fd: int) -> bool:
    """Lock out other sweepers; False if one holds the lock for long, which takes microseconds."""
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, write_lock(SWEEPER_BYTE))
            return True
        except (BlockingIOError, PermissionError):
            time.sleep(_LOCK_PAUSE_S)
    return False


def is_owned(path: Path) -> bool:
    """Whether a living process owns the segment under a name; False if the name is free.

    Raises:
        SegmentError: the name leads to something that is no file of this user.
    """
    try:
        with _opened(path) as fd:
            return is_locked(fd)
    except FileNotFoundError:
        return False


def open_name(path: Path, access: Access = Access.ALL) -> int:
    """Open the file under a name, to map it with this access. The caller closes the descriptor.

    Raises:
        FileNotFoundError: the name is free.
        SegmentError: the name leads to something that is no file of this user, or other users may
            use the folder.
    """
    with folder.opened(path.parent) as directory:
        try:
            fd = os.open(path.name, access.open_flags, dir_fd=directory)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise SegmentError(f"{path} is no segment of this user: {error.strerror}") from error
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return fd
    os.close(fd)
    raise SegmentError(
        f"{path} is no segment of this user: it belongs to user {status.st_uid}, this process is "
        f"user {os.geteuid()}, and its mode is {stat.filemode(status.st_mode)}"
    )


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = open_name(path)
    try:
        yield fd
    finally:
        os.close(fd)


def attach(path: Path, kind: SegmentKind, what: str, access: Access = Access.READER) -> Segment:
    """Map a named segment of this user.

    Args:
        path: the path of the segment.
        kind: the expected kind.
        what: the subject of error messages, for example "engine 'x'".
        access: the part that this process may write.

    Raises:
        SegmentError: the segment does not exist, belongs to another user, or its owner is dead.
        ProtocolMismatchError: the segment has another kind or version.
    """
    try:
        fd = open_name(path, access)
    except FileNotFoundError:
        others = _running_beside(path) if kind is SegmentKind.CONTROL else ""
        raise SegmentError(f"{what} is not running: there is no {path}{others}") from None
    except SegmentError as error:
        raise SegmentError(f"cannot attach to {what}: {error}") from error
    try:
        segment = Segment.attach(fd, kind, access)
    except BaseException:
        os.close(fd)
        raise
    if not segment.is_owned():
        segment.close()
        raise SegmentError(
            f"{what} is dead, only its segment {path} is left; remove it with: shmllm ipc gc --yes"
        )
    return segment


def _running_beside(path: Path) -> str:
    """The end of a message about an absent engine: the running ones, or how to start one."""
    found = names(None if path.parent in _directories() else path.parent)
    running = [each.engine for each in found if each.place is None and _is_live(each.path)]
    if running:
        return f"; running: {', '.join(running)}"
    return "; no named engine runs; start one with: shmllm engine start NAME"


def claim_place(segment: Segment, name: str, directory: Path | None = None) -> int:
    """Link a client's segment under the first free place of an engine. Two clients cannot get
    the same place, because the kernel lets only one of them link the name.

    Returns:
        The place.

    Raises:
        SegmentError: all places are taken.
    """
    control = control_path(name, directory)
    for place in range(NUM_CLIENTS):
        if _publish_in_folder(segment, client_path(name, place, control.parent)):
            return place
    raise SegmentError(f"engine {name!r} has {NUM_CLIENTS} clients, which is the most it takes")
