"""How an engine gets a region: adoption, the first free place, and memory of those not used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.shared_regions import NO_STATES, key_of, layout_of

from shmllm.errors import NoSpaceError, SegmentError
from shmllm.ipc import folder as folders
from shmllm.shared_kv import joining, region_files
from shmllm.shared_kv.folder import make_folder, places
from shmllm.shared_kv.joining import collect_one, join
from shmllm.shared_kv.layout import NUM_PLACES, RegionLayout
from shmllm.shared_kv.own_region import OwnRegion
from shmllm.shared_kv.region_files import create

LAYOUT = layout_of(8)


@pytest.fixture
def joined(folder: Path) -> Iterator[Callable[..., OwnRegion]]:
    made: list[OwnRegion] = []

    def make(layout: RegionLayout = LAYOUT) -> OwnRegion:
        made.append(join(folder, layout))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_engines_get_places_in_their_order(joined: Any) -> None:
    assert [joined().place for _ in range(3)] == [0, 1, 2]


def test_the_region_of_an_engine_that_has_ended_is_adopted(folder: Path, joined: Any) -> None:
    joined()
    create(folder, LAYOUT, [7]).close()
    inode = (folder / "7").stat().st_ino
    found = joined()
    assert (found.place, os.fstat(found.fd).st_ino) == (7, inode)
    assert joined().place == 1


def test_a_region_of_another_size_stays(folder: Path, joined: Any) -> None:
    create(folder, layout_of(16), [0]).close()
    assert joined().place == 1
    assert places(folder).keys() == {0, 1}


def test_a_damaged_region_without_owner_is_removed(folder: Path, joined: Any) -> None:
    (folder / "0").write_text("x" * 9000)
    living = create(folder, LAYOUT, [1])
    os.pwrite(living.fd, b"x", 0)
    assert joined().place == 0
    assert (folder / "1").exists(), "its owner lives"
    living.close()


@pytest.mark.parametrize("kind", ["link", "directory", "fifo"])
def test_other_files_are_passed_over(folder: Path, joined: Any, kind: str) -> None:
    if kind == "link":
        (folder / "0").symlink_to("nowhere")
    elif kind == "directory":
        (folder / "0").mkdir()
    else:
        os.mkfifo(folder / "0")
    assert joined().place == 1
    if kind == "directory":
        (folder / "0").rmdir()


def test_a_full_folder_is_an_error(folder: Path, joined: Any) -> None:
    for place in range(NUM_PLACES):
        (folder / str(place)).mkdir()
    with pytest.raises(SegmentError, match="has 32 regions, which is the most"):
        joined()
    (folder / "31").rmdir()
    assert joined().place == 31


def test_a_layout_without_blocks_is_an_error(joined: Any) -> None:
    with pytest.raises(SegmentError, match="no room for a block"):
        joined(RegionLayout((NO_STATES, NO_STATES)))


def test_a_place_that_is_taken_at_the_same_moment_is_passed_over(
    folder: Path, joined: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(fd: int, path: Path) -> None:
        if path.name == "0":
            path.touch()
        folders.link(fd, path)

    monkeypatch.setattr(region_files, "link", late)
    assert joined().place == 1


@pytest.mark.parametrize("when", ["before", "in between"])
def test_a_folder_that_is_removed_meanwhile_is_made_again(
    folder: Path, joined: Any, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """`shmllm kv gc` removes empty folders."""
    if when == "before":
        folder.rmdir()
    else:

        def late(fd: int, path: Path) -> None:
            monkeypatch.undo()
            folder.rmdir()
            folders.link(fd, path)

        monkeypatch.setattr(region_files, "link", late)
    assert joined().place == 0
    assert places(folder).keys() == {0}


def test_memory_of_other_keys_is_freed_the_oldest_first(
    folder: Path, joined: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [make_folder(f"{n:016x}") for n in range(3)]
    for age, other in enumerate(others):
        create(other, LAYOUT, [0]).close()
        os.utime(other / "0", (1000 - age, 1000 - age))
    living = create(others[2], LAYOUT, [1])
    os.utime(living.path, (1, 1))
    refusals, real = [1, 2], joining.create

    def full(*arguments: Any) -> OwnRegion:
        if refusals:
            refusals.pop()
            raise NoSpaceError("full")
        return real(*arguments)

    monkeypatch.setattr(joining, "create", full)
    assert joined().place == 0
    assert [each.exists() for each in others] == [True, False, True]
    assert [*places(others[2])] == [1], "an engine uses it"
    living.close()


def test_without_others_a_lack_of_memory_is_an_error(
    joined: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    living = create(folder, layout_of(16), [0])

    def full(*_: Any) -> OwnRegion:
        raise NoSpaceError("shared memory is full")

    monkeypatch.setattr(joining, "create", full)
    with pytest.raises(NoSpaceError, match="full"):
        joined()
    assert (folder / "0").exists()
    assert not collect_one(folder)
    living.close()


def test_without_room_a_region_of_another_size_is_adopted(
    joined: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = create(folder, layout_of(16), [0])
    other.publish(0, 3, key_of(1))
    other.close()

    def full(*_: Any) -> OwnRegion:
        raise NoSpaceError("shared memory is full")

    monkeypatch.setattr(joining, "create", full)
    region = joined()
    assert (region.place, region.layout) == (0, layout_of(16))
    assert region.entries(0) == [(3, key_of(1))]


def test_nothing_is_removed_in_vain(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = make_folder("1" * 16)
    create(other, LAYOUT, [0]).close()

    def full(*_: Any) -> OwnRegion:
        raise NoSpaceError("shared memory is full")

    monkeypatch.setattr(joining, "create", full)
    monkeypatch.setattr(joining, "unused_bytes", lambda keep: -(2**60))
    with pytest.raises(NoSpaceError):
        join(folder, LAYOUT)
    assert [*places(other)] == [0]
