"""Folders that only this user can use, in directories that all users share.

    /dev/shm/shmllm-UID             names of segments (registry.py)
    /tmp/shmllm-UID                 logs of detached engines
    .../shmllm-UID.RANDOM           the same, if another user took the first name

This module makes and finds such folders, and opens them for operations relative to a descriptor.
It must not know what they contain. A folder is recognised by its owner: in a directory with the
sticky bit, another user can take a name that is still free, but can neither remove nor replace a
folder of this user, nor create one that belongs to this user. A name with 64 random bits cannot be
taken in advance. If several folders belong to this user, `find` returns all of them, so nothing in
them is lost; no code of shmllm removes a folder.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shmllm.errors import SegmentError

NAME_PATTERN = r"shmllm-\d+(?:\.[0-9a-f]{16})?"
_ALL_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OPEN_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def first_path(root: Path) -> Path:
    """The path of this user's folder in `root`, if no other user took it."""
    return root / f"shmllm-{os.geteuid()}"


def find(root: Path) -> list[Path]:
    """The folders of this user in `root`, sorted. A folder with another mode than 0700 gets that
    mode: it may be the rest of a process that was killed in `make`, or a mistake of its owner."""
    first = first_path(root).name
    pattern = re.compile(rf"{first}(?:\.[0-9a-f]{{16}})?")
    names = sorted(name for name in os.listdir(root) if pattern.fullmatch(name))
    return [path for name in names if _is_ours(path := root / name)]


def make(root: Path) -> Path:
    """The first folder of this user in `root`, which is created if there is none.

    Raises:
        SegmentError: the folder cannot be created.
    """
    try:
        if found := find(root):
            return found[0]
        path = first_path(root)
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        if not _is_ours(path):  # another user's, or no directory
            path = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
            os.mkdir(path, 0o700)
            _is_ours(path)
        return path
    except OSError as error:
        raise SegmentError(
            f"cannot make a folder of user {os.geteuid()} in {root}: {error.strerror}; this user "
            "needs write access to that directory"
        ) from error


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a folder that only this user can use, for the `dir_fd` of functions of `os`.

    Raises:
        FileNotFoundError: the folder does not exist.
        SegmentError: other users may use the folder, or it is a link or no directory.
    """
    try:
        descriptor = os.open(path, _OPEN_FLAGS)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SegmentError(f"cannot open the folder {path}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise SegmentError(
                f"the folder {path} belongs to user {status.st_uid} and this process is user "
                f"{os.geteuid()}"
            )
        if status.st_mode & _ALL_OTHERS:
            raise SegmentError(f"other users may use the folder {path}; run: chmod 700 {path}")
        yield descriptor
    finally:
        os.close(descriptor)


def link(fd: int, path: Path) -> None:
    """Give an unnamed file a name in a folder that only this user can use.

    Raises:
        FileExistsError: the name is taken.
        OSError: the folder does not exist, or the system refuses.
        SegmentError: see `opened`.
    """
    # Python calls linkat(2) only with a directory descriptor, and only linkat can follow the
    # symbolic link in /proc/self/fd to the unnamed file.
    descriptors = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with opened(path.parent) as directory:
            os.link(
                str(fd),
                path.name,
                src_dir_fd=descriptors,
                dst_dir_fd=directory,
                follow_symlinks=True,
            )
    finally:
        os.close(descriptors)


def list_names(path: Path) -> list[str]:
    """The sorted names in a folder; the same errors as `opened`."""
    with opened(path) as folder:
        readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
        try:
            return sorted(os.listdir(readable))
        finally:
            os.close(readable)


def _is_ours(path: Path) -> bool:
    """Whether `path` is a directory of this user. If so, it has the mode 0700 afterwards."""
    try:
        descriptor = os.open(path, _OPEN_FLAGS)
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            return False
        if stat.S_IMODE(status.st_mode) != 0o700:
            # fchmod(2) refuses a descriptor of O_PATH, and another open needs the missing rights.
            os.chmod(f"/proc/self/fd/{descriptor}", 0o700)
        return True
    finally:
        os.close(descriptor)
