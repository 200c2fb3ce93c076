"""The folders of regions: which names count, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shmllm.errors import SegmentError
from shmllm.shared_kv.folder import (
    folders,
    key_of,
    make_folder,
    places,
    region_path,
    remove_if_empty,
)

KEY = "0123456789abcdef"


def test_a_folder_is_made_once_and_found_by_its_key(root: Path) -> None:
    made = make_folder(KEY)
    assert make_folder(KEY) == made
    assert folders() == [made]
    assert key_of(made) == KEY
    assert made.stat().st_mode & 0o777 == 0o700


def test_other_names_are_no_folders(root: Path, folder: Path) -> None:
    beside = folder.parent
    for name in ("kv+0123", "kv+0123456789abcdeg", "engine", "kv+0123456789abcdef.old"):
        (beside / name).mkdir()
    (beside / "kv+1111111111111111").write_text("a file")
    (beside / "kv+2222222222222222").symlink_to(folder)
    assert folders() == [folder]


def test_a_folder_that_others_may_use_is_refused(root: Path, folder: Path) -> None:
    folder.chmod(0o770)
    with pytest.raises(SegmentError, match="chmod 700"):
        make_folder(KEY)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_directory_is_refused(root: Path, folder: Path, kind: str) -> None:
    folder.rmdir()
    if kind == "file":
        folder.write_text("")
    else:
        (root / "elsewhere").mkdir()
        folder.symlink_to(root / "elsewhere")
    with pytest.raises(SegmentError, match=KEY):
        make_folder(KEY)


def test_places_are_regular_files_with_canonical_numbers(folder: Path) -> None:
    for name in ("0", "7", "31", "32", "07", "100", "x", "٣", "-1"):
        (folder / name).write_text("")
    (folder / "1").mkdir()
    os.mkfifo(folder / "2")
    (folder / "3").symlink_to(folder / "7")
    assert places(folder) == {n: (folder / str(n)).stat().st_ino for n in (0, 7, 31)}
    assert region_path(folder, 7) == folder / "7"


def test_a_folder_that_is_gone_has_no_places(folder: Path) -> None:
    folder.rmdir()
    assert places(folder) == {}


def test_only_an_empty_folder_is_removed(folder: Path) -> None:
    (folder / "0").write_text("")
    remove_if_empty(folder)
    assert folder.exists()
    (folder / "0").unlink()
    remove_if_empty(folder)
    assert not folder.exists()
    remove_if_empty(folder)
