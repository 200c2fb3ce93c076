"""What is written appears when it is complete, and nothing else is left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

import pytest

from shmllm.errors import QuantizeError
from shmllm.quantize.target import Target


def file_target(path: Path, overwrite: bool = False) -> Target:
    return Target(path, is_directory=False, overwrite=overwrite)


def directory_target(path: Path, overwrite: bool = False) -> Target:
    return Target(path, is_directory=True, overwrite=overwrite)


def write(target: Target, text: str = "x") -> None:
    with target.writing() as path:
        (path / "config.json" if path.is_dir() else path).write_text(text)


def test_a_file_and_a_directory_appear_at_the_end(tmp_path: Path) -> None:
    with file_target(tmp_path / "a").writing():
        assert not (tmp_path / "a").exists()
    write(directory_target(tmp_path / "b"))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "b"]
    assert (tmp_path / "b" / "config.json").read_text() == "x"


@pytest.mark.parametrize("make", [file_target, directory_target])
def test_an_exception_leaves_nothing(make: type[Target], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), make(tmp_path / "a").writing():
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [file_target, directory_target])
def test_what_exists_stays_unless_it_may_be_replaced(make: type[Target], tmp_path: Path) -> None:
    write(make(tmp_path / "a"), "old")
    with pytest.raises(QuantizeError, match="a exists; choose another name, or add --overwrite"):
        make(tmp_path / "a")
    write(make(tmp_path / "a", True), "new")
    file = tmp_path / "a"
    assert (file / "config.json" if file.is_dir() else file).read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_a_directory_is_replaced_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that is killed leaves the old one or the new one."""
    write(directory_target(tmp_path / "a"), "old")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shmllm.quantize.target._remove", lambda _: None)
    monkeypatch.setattr(os, "rename", killed)
    with contextlib.suppress(KeyboardInterrupt):
        write(directory_target(tmp_path / "a", True), "new")
    assert (tmp_path / "a" / "config.json").read_text() == "new"
    assert (tmp_path / ".a.unfinished" / "config.json").read_text() == "old"


def test_only_a_directory_with_a_model_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.txt").touch()
    with pytest.raises(QuantizeError, match="the directory has no model"):
        directory_target(tmp_path / "a", True)
    with pytest.raises(QuantizeError, match="it is not a file"):
        file_target(tmp_path / "a", True)


@pytest.mark.parametrize("make", [file_target, directory_target])
def test_what_is_no_file_is_not_replaced(make: type[Target], tmp_path: Path) -> None:
    """A pipe here, and /dev/null elsewhere."""
    os.mkfifo(tmp_path / "a")
    with pytest.raises(QuantizeError, match=r"cannot overwrite .*a: it is not a"):
        make(tmp_path / "a", True)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="nowhere does not exist or is not writable"):
        file_target(tmp_path / "nowhere" / "a")


@pytest.mark.parametrize("make", [file_target, directory_target])
def test_what_a_killed_process_left_is_removed(make: type[Target], tmp_path: Path) -> None:
    left = tmp_path / ".a.unfinished"
    left.mkdir() if make is directory_target else left.write_text("half")
    write(make(tmp_path / "a"))
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_another_process_may_take_what_is_not_locked_yet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    unfinished, lock = tmp_path / ".a.unfinished", fcntl.flock

    def late(descriptor: int, how: int) -> None:
        unfinished.unlink()
        unfinished.write_text("of the other")
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(QuantizeError, match="another process is writing"):
        write(file_target(tmp_path / "a"))
    assert unfinished.read_text() == "of the other"


def test_two_processes_do_not_write_the_same(tmp_path: Path) -> None:
    left = tmp_path / ".a.unfinished"
    left.touch()
    other = os.open(left, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(QuantizeError, match="another process is writing"):
            write(file_target(tmp_path / "a"))
    finally:
        os.close(other)
    assert left.exists()


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), OSError("64 requested and 3 written")],
)
def test_a_full_disk_is_named(error: OSError, tmp_path: Path) -> None:
    with (
        pytest.raises(QuantizeError, match=r"cannot write .*a: the disk is full"),
        file_target(tmp_path / "a").writing(),
    ):
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_named_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match=r"needs .* MiB are free on the disk"):
        file_target(tmp_path / "a").check_room(2**62)


def test_the_source_is_not_written_over(tmp_path: Path) -> None:
    write(directory_target(tmp_path / "model"))
    with pytest.raises(QuantizeError, match="the model is read from there"):
        directory_target(tmp_path / "model", True).check_not(tmp_path / "model")
