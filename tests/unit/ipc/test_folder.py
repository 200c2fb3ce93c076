"""The folder that only this user can use, in a directory that all users share."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmllm.errors import SegmentError
from shmllm.ipc import folder


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return folder.first_path(tmp_path)


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o777)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def is_random(path: Path, first: Path) -> bool:
    suffix = path.name.removeprefix(first.name + ".")
    return path.parent == first.parent and len(suffix) == 16 and int(suffix, 16) >= 0


def test_a_folder_is_made_once_and_found_again(tmp_path: Path, first: Path) -> None:
    assert folder.find(tmp_path) == []
    assert folder.make(tmp_path) == first
    assert (mode(first), first.stat().st_uid) == (0o700, os.geteuid())
    assert folder.make(tmp_path) == first
    assert folder.find(tmp_path) == [first]


def test_a_folder_has_its_mode_whatever_the_umask(tmp_path: Path, first: Path, umask: None) -> None:
    assert folder.make(tmp_path) == first
    assert mode(first) == 0o700


@pytest.mark.parametrize("wrong", [0o777, 0o1777, 0o755, 0o000, 0o500])
def test_another_mode_is_repaired(tmp_path: Path, first: Path, wrong: int) -> None:
    first.mkdir()
    first.chmod(wrong)
    assert folder.find(tmp_path) == [first]
    assert mode(first) == 0o700
    first.chmod(wrong)
    assert folder.make(tmp_path) == first
    assert mode(first) == 0o700


def test_a_link_a_file_or_a_pipe_in_its_place_is_left_alone(tmp_path: Path, first: Path) -> None:
    target = tmp_path / "target"
    target.mkdir(0o755)
    for obstacle in (
        lambda: first.symlink_to(target),
        first.touch,
        lambda: os.mkfifo(first),
    ):
        obstacle()
        assert folder.find(tmp_path) == []
        made = folder.make(tmp_path)
        assert is_random(made, first)
        assert mode(made) == 0o700
        assert folder.make(tmp_path) == made
        made.rmdir()
        first.unlink()
    assert mode(target) == 0o755


def test_another_user_s_folder_is_left_alone(
    tmp_path: Path, first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_stat = os.fstat

    def of_another_user(fd: int) -> os.stat_result:
        status = list(really_stat(fd))
        if os.readlink(f"/proc/self/fd/{fd}") == str(first):
            status[stat.ST_UID] += 1
        return os.stat_result(status)

    first.mkdir(0o777)
    before = mode(first)
    monkeypatch.setattr(os, "fstat", of_another_user)
    assert folder.find(tmp_path) == []
    made = folder.make(tmp_path)
    assert is_random(made, first)
    assert folder.find(tmp_path) == [made]
    with pytest.raises(SegmentError, match=f"{first} belongs to user {os.geteuid() + 1}"):
        folder.list_names(first)
    assert mode(first) == before


def test_all_folders_of_the_user_are_found(tmp_path: Path, first: Path) -> None:
    ours = [first, first.with_name(f"{first.name}.{'0' * 16}")]
    ours.append(first.with_name(f"{first.name}.{'f' * 16}"))
    strangers = [f"{first.name}0", f"{first.name}.1", f"{first.name}.{'g' * 16}", "shmllm-"]
    for path in [*reversed(ours), *(tmp_path / name for name in strangers)]:
        path.mkdir(0o700)
    assert folder.find(tmp_path) == ours
    assert folder.make(tmp_path) == first


def test_the_process_that_is_slower_takes_the_folder_of_the_faster(
    tmp_path: Path, first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_make = os.mkdir

    def make_late(path: Path, mode: int) -> None:
        monkeypatch.undo()
        really_make(path, mode)
        really_make(path, mode)

    monkeypatch.setattr(os, "mkdir", make_late)
    assert folder.make(tmp_path) == first
    assert folder.find(tmp_path) == [first]


@pytest.mark.parametrize("wrong", [0o701, 0o770, 0o1777])
def test_a_directory_that_others_may_use_is_not_opened_nor_changed(
    tmp_path: Path, wrong: int
) -> None:
    tmp_path.chmod(wrong)
    with pytest.raises(SegmentError, match=f"other users may use .*chmod 700 {tmp_path}"):
        folder.list_names(tmp_path)
    assert mode(tmp_path) == wrong


def test_a_link_is_not_opened(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(SegmentError, match="Not a directory"):
        folder.list_names(link)


def test_operations_stay_in_the_folder_that_was_checked(tmp_path: Path, first: Path) -> None:
    folder.make(tmp_path)
    with folder.opened(first) as descriptor:
        first.rename(tmp_path / "moved")
        first.mkdir()
        os.mkdir("entry", dir_fd=descriptor)
    assert folder.list_names(tmp_path / "moved") == ["entry"]


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SegmentError, match=f"in {tmp_path}/absent: No such file.*needs write"):
        folder.make(tmp_path / "absent")


def test_a_folder_that_disappears_is_absent(tmp_path: Path, first: Path) -> None:
    folder.make(tmp_path).rmdir()
    with pytest.raises(FileNotFoundError):
        folder.list_names(first)
