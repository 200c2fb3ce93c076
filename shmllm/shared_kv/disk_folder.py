"""The directory on disk that has copies of shared blocks.

    DIRECTORY/kv-KEY.blocks             keys and values
    DIRECTORY/kv-KEY.states             recurrent states
    DIRECTORY/kv-....damaged            a file that could not be used

KEY is that of the folder of regions, so a file has blocks that were computed by the same bits. This
module must not know what is in a file.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

from shmllm.errors import EngineStartError
from shmllm.ipc.segment import set_lock
from shmllm.shared_kv.disk_layout import USER_BYTE

KINDS = ("blocks", "states")
"""The endings of the files of each section."""
DAMAGED = ".damaged"
_FILE = re.compile(rf"kv-[0-9a-f]{{16}}\.(?:{'|'.join(KINDS)})(?:{re.escape(DAMAGED)})?")


def check_directory(path: str) -> None:
    """Make the directory, if there is none, and try to write a file there.

    Raises:
        EngineStartError: that is not possible.
    """
    try:
        os.makedirs(path, 0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return
    except FileExistsError:
        problem = "it is not a directory"
    except OSError as error:
        problem = error.strerror or str(error)
    raise EngineStartError(
        f"shared_kv_cache_path {path!r} cannot be used: {problem}; pass a directory in which this "
        "user may make files, or leave the option out"
    )


def file_path(directory: Path, key: str, section: int) -> Path:
    """The path of a file."""
    return directory / f"kv-{key}.{KINDS[section]}"


def set_aside(path: Path) -> Path:
    """Rename a file that cannot be used, and return its new path."""
    aside = path.with_name(path.name + DAMAGED)
    with suppress(FileNotFoundError):  # another engine has done so
        os.replace(path, aside)
    return aside


def make_room(directory: Path, limit_bytes: int, needed_bytes: int) -> int:
    """Remove files that nobody has open, those that were used longest ago first, until there is
    room.

    Args:
        directory: the directory.
        limit_bytes: the most bytes of all its files.
        needed_bytes: by how much a file is to grow.

    Returns:
        The bytes by which files may grow.
    """
    found: list[tuple[float, int, Path]] = []
    for name in os.listdir(directory):
        if _FILE.fullmatch(name):
            with suppress(FileNotFoundError):
                status = (directory / name).lstat()
                found.append((status.st_mtime, status.st_size, directory / name))
    free = limit_bytes - sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if free >= needed_bytes:
            break
        if _remove(path):
            free += size
    return max(free, 0)


def _remove(path: Path) -> bool:
    """Remove a file unless somebody has it open."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # Who opens the file takes this lock, and then looks whether the file still has its name.
        if not set_lock(fd, USER_BYTE, fcntl.F_WRLCK):
            return False
        if os.fstat(fd).st_ino != path.lstat().st_ino:
            return False
        path.unlink()
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
