"""The regions of this user, with and without an engine, and how their memory is freed.

A region outlives its engine, so that the next one of the same key finds its blocks. It is removed
under its locks, here and nowhere else, but for the owner's own. A file that is no region, but has
the name of one, is damaged: no engine can adopt it. Files with other names are foreign; they stay.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shmllm.errors import ProtocolMismatchError, SegmentError
from shmllm.shared_kv.folder import folders, is_place, key_of, places, region_path, remove_if_empty
from shmllm.shared_kv.region import Region
from shmllm.shared_kv.region_files import is_owned, remove


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file in a folder of regions.

    Attributes:
        path: its path.
        num_bytes: the memory that it has.
        used_s: when an engine used its blocks last, in seconds since 1970, as far as its owner has
            noted it.
        is_owned: whether a living engine owns it.
        is_foreign: whether its name is not that of a region.
        problem: why it cannot be read; empty: it can.
        description: what its engine has written about itself and its blocks.
        num_blocks: for each section, the number of its blocks.
        num_readable: for each section, the number of those that can be read.
    """

    path: Path
    num_bytes: int
    used_s: float
    is_owned: bool = False
    is_foreign: bool = False
    problem: str = ""
    description: Mapping[str, Any] = field(default_factory=dict)
    num_blocks: tuple[int, ...] = ()
    num_readable: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """The key of its folder."""
        return key_of(self.path.parent)

    @property
    def title(self) -> str:
        """KEY/PLACE."""
        return f"{self.key}/{self.path.name}"

    @property
    def is_collectable(self) -> bool:
        """Whether it may be removed: its engine has ended, if it ever had one."""
        return not self.is_owned and not self.is_foreign

    @property
    def pid(self) -> int | None:
        """The process of its engine, in that engine's pid namespace; None if it has ended."""
        pid = self.description.get("pid")
        return pid if self.is_owned and isinstance(pid, int) else None

    @property
    def began_s(self) -> float | None:
        """When its last owner began, in seconds since 1970; None: it is not known."""
        began = self.description.get("began")
        return float(began) if isinstance(began, int | float) else None

    def text(self, name: str) -> str | None:
        """A text of the description, which can be printed; None: there is none."""
        value = self.description.get(name)
        if not isinstance(value, str) or not value:
            return None
        return "".join(each if each.isprintable() else "?" for each in value)

    def is_of(self, model: str) -> bool:
        """Whether it has this key, or belongs to a model of this name or directory."""
        directory = self.text("model")
        names = {self.key, self.text("name"), directory}
        return model in names or (directory is not None and Path(directory).name == model)


def find_files() -> list[FoundFile]:
    """Look at all files in the folders of this user, by key and place."""
    found = []
    for folder in folders():
        with suppress(FileNotFoundError):
            for name in sorted(os.listdir(folder), key=lambda name: (len(name), name)):
                with suppress(FileNotFoundError):
                    found.append(_look_at(folder / name))
    return found


def used_bytes() -> int:
    """The memory of all regions of this user."""
    total = 0
    for folder in folders():
        for place in places(folder):
            with suppress(FileNotFoundError):
                total += _bytes_of(region_path(folder, place).lstat())
    return total


def unused_files(files: Iterable[FoundFile], for_s: float) -> list[FoundFile]:
    """Of some files, those that help nobody: damaged ones, and regions of keys that no living
    engine has, and that no engine has used for `for_s` seconds.

    An engine reads all regions of its key, so each of them is as recently used as any of them.

    Args:
        files: all files of the folders in question.
        for_s: that time.
    """
    files = list(files)
    used = dict[Path, float]()
    for file in files:
        last = time.time() if file.is_owned else file.used_s
        used[file.path.parent] = max(last, used.get(file.path.parent, 0.0))
    living = {file.path.parent for file in files if file.is_owned}
    before = time.time() - for_s
    return [
        file
        for file in files
        if file.is_collectable
        and (file.problem or (file.path.parent not in living and used[file.path.parent] <= before))
    ]


def remove_files(files: Iterable[FoundFile]) -> Iterator[tuple[FoundFile, bool]]:
    """Remove collectable files under their locks, and yield each with whether it is gone: an engine
    may have adopted it meanwhile. Engines that read it keep its memory until they look again."""
    for file in files:
        try:
            is_gone = remove(file.path)
        except SegmentError:
            is_gone = False
        remove_if_empty(file.path.parent)
        yield file, is_gone


def remove_empty_folders() -> None:
    """Remove folders without a file. An engine that is about to need one makes it again."""
    for folder in folders():
        remove_if_empty(folder)


def unused_bytes(keep: Path) -> int:
    """The memory of the regions in all folders but one whose engines have ended."""
    files = find_files()
    return sum(each.num_bytes for each in files if each.is_collectable and each.path.parent != keep)


def collect_one(keep: Path) -> bool:
    """Remove the region, of an engine that has ended, that was used longest ago. Returns whether
    there was one.

    Args:
        keep: a folder whose regions stay.
    """
    found = []
    for folder in folders():
        for place in places(folder):
            path = region_path(folder, place)
            with suppress(FileNotFoundError):
                found.append((path.stat().st_mtime, path))
    for _, path in sorted(found):
        with suppress(SegmentError):  # it is none of a region
            if path.parent != keep and remove(path):
                remove_if_empty(path.parent)
                return True
    return False


def _look_at(path: Path) -> FoundFile:
    status = path.lstat()
    size, used_s = _bytes_of(status), status.st_mtime
    if not is_place(path.name) or not stat.S_ISREG(status.st_mode):
        problem = "shmllm gives no file this name"
        if is_place(path.name):
            problem = f"it is no file, but {stat.filemode(status.st_mode)}"
        return FoundFile(path, size, used_s, is_foreign=True, problem=problem)
    try:
        with closing(Region.open(path, int(path.name))) as region:
            owned, sections = region.is_owned, region.layout.sections
            return FoundFile(
                path,
                size,
                used_s,
                owned,
                description=region.description,
                num_blocks=tuple(each.num_blocks for each in sections),
                num_readable=tuple(map(region.num_valid, range(len(sections)))),
                problem="it was truncated" if region.is_lost else "",
            )
    except FileNotFoundError:
        raise
    except (OSError, ProtocolMismatchError) as error:
        text = (error.strerror or "") if isinstance(error, OSError) else str(error)
        problem = text.removeprefix(f"{path} is damaged: ").removeprefix(f"{path} is ")
        return FoundFile(path, size, used_s, _is_owned(path), problem=problem)


def _is_owned(path: Path) -> bool:
    with suppress(OSError):
        return is_owned(path)
    return False


def _bytes_of(status: os.stat_result) -> int:
    return status.st_blocks * 512
