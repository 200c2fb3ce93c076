"""The folders in which regions have their names.

    /dev/shm/shmllm-UID/kv+KEY/PLACE        a region

The environment variable SHMLLM_SHARED_KV_DIR names another directory than /dev/shm, for example one
of a tmpfs with huge pages.

A folder has the regions of engines that compute the same bits for the same tokens: KEY is a hash of
all that decides them. No name of an engine has a '+', so the registry of engines passes over these
folders. This module must not know what a region contains.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from shmllm.errors import SegmentError
from shmllm.ipc import folder
from shmllm.shared_kv.layout import NUM_PLACES

DIRECTORY_VARIABLE = "SHMLLM_SHARED_KV_DIR"
"""The environment variable with the directory of all regions, in a tmpfs, instead of /dev/shm."""
_FOLDER = re.compile(r"kv\+([0-9a-f]{16})")
_REGION = re.compile(r"0|[1-9][0-9]?")


def root() -> Path:
    """The directory of all regions; there may be none yet.

    Raises:
        SegmentError: it is no absolute path.
    """
    path = Path(os.environ.get(DIRECTORY_VARIABLE) or "/dev/shm")
    if not path.is_absolute():
        raise SegmentError(f"{DIRECTORY_VARIABLE} must be an absolute path, got {str(path)!r}")
    return path


def make_root() -> Path:
    """Make the directory of all regions if there is none.

    Raises:
        SegmentError: it cannot be made.
    """
    path = root()
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise SegmentError(
            f"cannot make {path}, which {DIRECTORY_VARIABLE} names: {error.strerror}"
        ) from error
    return path


def make_folder(key: str) -> Path:
    """Make the folder of a key, of 16 hexadecimal digits, if there is none.

    Raises:
        SegmentError: it cannot be made, or others may use it.
    """
    path = folder.make(make_root()) / f"kv+{key}"
    try:
        path.mkdir(0o700, exist_ok=True)
        with folder.opened(path):
            return path
    except OSError as error:
        raise SegmentError(f"cannot make the folder {path}: {error.strerror}") from error


def folders() -> list[Path]:
    """The folders of this user, by their names."""
    directory = root()
    return sorted(
        path
        for own in (folder.find(directory) if directory.is_dir() else ())
        for path in own.iterdir()
        if _FOLDER.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    )


def key_of(path: Path) -> str:
    """The key of a folder."""
    return path.name.removeprefix("kv+")


def places(path: Path) -> dict[int, int]:
    """The places of a folder that have a region, and the inodes of their files. What is no regular
    file is no region."""
    try:
        with os.scandir(path) as entries:
            return {
                int(each.name): each.inode()
                for each in entries
                if is_place(each.name) and each.is_file(follow_symlinks=False)
            }
    except FileNotFoundError:
        return {}


def is_place(name: str) -> bool:
    """Whether a file of this name is a region."""
    return _REGION.fullmatch(name) is not None and int(name) < NUM_PLACES


def region_path(path: Path, place: int) -> Path:
    """The path of a region."""
    return path / str(place)


def remove_if_empty(path: Path) -> None:
    """Remove a folder that has no region."""
    with suppress(OSError):
        path.rmdir()
