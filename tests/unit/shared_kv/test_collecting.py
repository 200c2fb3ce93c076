"""What is found in the folders of regions, and what is removed, without an engine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shmllm.errors import ProtocolMismatchError
from shmllm.shared_kv.collecting import (
    FoundFile,
    collect_one,
    find_files,
    remove_empty_folders,
    remove_files,
    unused_files,
    used_bytes,
)
from shmllm.shared_kv.folder import make_folder
from shmllm.shared_kv.layout import RegionLayout, Section
from shmllm.shared_kv.own_region import OwnRegion
from shmllm.shared_kv.region import Region
from shmllm.shared_kv.region_files import adopt, create

LAYOUT = RegionLayout((Section(8, 2, 4096), Section(0, 0, 0)))
KEY, OTHER = "0123456789abcdef", "fedcba9876543210"
HOUR_S = 3600.0


class Regions:
    """Makes regions."""

    def __init__(self) -> None:
        self.opened: list[OwnRegion] = []

    def make(self, place: int, key: str = KEY, **description: object) -> OwnRegion:
        region = create(make_folder(key), LAYOUT, [place])
        region.describe({"pid": os.getpid(), "began": time.time(), "name": "tiny"} | description)
        self.opened.append(region)
        return region

    def make_ended(self, place: int, key: str = KEY, hours: float = 0.0) -> Path:
        """A region whose engine has ended, and which was used so many hours ago."""
        region = self.make(place, key)
        self.opened.remove(region)
        region.close()
        moment = time.time() - HOUR_S * hours
        os.utime(region.path, (moment, moment))
        return region.path

    def find(self) -> dict[str, FoundFile]:
        return {file.title: file for file in find_files()}

    def unused(self, hours: float) -> set[str]:
        return {file.title for file in unused_files(find_files(), HOUR_S * hours)}


@pytest.fixture
def regions(own_regions: Path) -> Iterator[Regions]:
    made = Regions()
    yield made
    for region in made.opened:
        region.close()


def test_a_region_is_described_by_what_its_engine_wrote(regions: Regions) -> None:
    own = regions.make(3, model="/models/tiny", dtype="float32")
    own.publish(0, 2, b"k" * 32)
    own.publish(0, 5, b"l" * 32)
    found = regions.find()[f"{KEY}/3"]
    assert found.is_owned
    assert found.pid == os.getpid()
    assert (found.num_readable, found.num_blocks) == ((2, 0), (8, 0))
    assert found.num_bytes == used_bytes() >= LAYOUT.data_bytes
    assert found.problem == ""
    assert all(found.is_of(name) for name in (KEY, "tiny", "/models/tiny"))
    assert not found.is_of("models")
    assert not found.is_collectable


def test_a_region_without_an_engine_has_no_pid(regions: Regions) -> None:
    regions.make_ended(0)
    found = regions.find()[f"{KEY}/0"]
    assert (found.is_owned, found.pid, found.is_collectable) == (False, None, True)


@pytest.mark.parametrize(
    "written", [b"", b"[1]", b"[" * 3000, b'{"pid": []', b'{"began": "x", "name": 7, "model": {}}']
)
def test_a_damaged_description_describes_nothing(regions: Regions, written: bytes) -> None:
    own = regions.make(0)
    offset = 1024
    os.pwrite(own.fd, written.ljust(3072, b"\0"), offset)
    found = regions.find()[f"{KEY}/0"]
    assert found.is_owned
    assert (found.pid, found.began_s, found.text("name"), found.problem) == (None, None, None, "")


def test_texts_of_a_description_cannot_control_a_terminal(regions: Regions) -> None:
    regions.make(0, name="a\x1b[2Jb")
    assert regions.find()[f"{KEY}/0"].text("name") == "a?[2Jb"


def damage(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def test_damaged_and_foreign_files_are_told_with_a_reason(regions: Regions) -> None:
    folder = make_folder(KEY)
    damage(folder / "0", b"")
    damage(folder / "1", b"x" * 8192)
    damage(folder / "note", b"hello")
    damage(folder / "32", b"hello")
    (folder / "2").mkdir()
    (folder / "3").symlink_to("1")
    os.mkfifo(folder / "4")
    found = regions.find()
    assert found[f"{KEY}/0"].problem == "it has 0 bytes"
    assert "no region of this version" in found[f"{KEY}/1"].problem
    assert {title for title, file in found.items() if file.is_foreign} == {
        f"{KEY}/{name}" for name in ("note", "32", "2", "3", "4")
    }
    assert all(file.problem for file in found.values())
    assert regions.unused(24) == {f"{KEY}/0", f"{KEY}/1"}
    removed = [file.title for file, is_gone in remove_files(unused_files(found.values(), 0))]
    assert removed == [f"{KEY}/0", f"{KEY}/1"]
    assert regions.find().keys() == found.keys() - set(removed)


def test_a_damaged_file_of_a_living_engine_stays(regions: Regions) -> None:
    own = regions.make(0)
    os.pwrite(own.fd, bytes(64), 0)
    found = regions.find()[f"{KEY}/0"]
    assert found.is_owned
    assert found.problem
    assert regions.unused(0) == set()


def test_regions_are_unused_after_a_time_unless_an_engine_of_their_key_lives(
    regions: Regions,
) -> None:
    regions.make_ended(0, hours=30)
    regions.make_ended(1, hours=20)
    regions.make_ended(0, OTHER, hours=30)
    assert regions.unused(24) == {f"{OTHER}/0"}
    assert regions.unused(10) == {f"{KEY}/0", f"{KEY}/1", f"{OTHER}/0"}
    regions.make(2)
    assert regions.unused(0) == {f"{OTHER}/0"}


def test_a_region_that_is_adopted_counts_as_used(regions: Regions) -> None:
    path = regions.make_ended(0, hours=30)
    own = adopt(path, 0, LAYOUT)
    assert own is not None
    own.close()
    assert regions.unused(24) == set()


def test_removal_frees_the_name_and_leaves_readers_their_memory(regions: Regions) -> None:
    own = regions.make(0)
    own.publish(0, 2, b"k" * 32)
    with suppress(ValueError):
        regions.opened.remove(own)
    own.close()
    reader = Region.open(own.path, 0)
    [(file, is_gone)] = remove_files(find_files())
    assert (file.title, is_gone) == (f"{KEY}/0", True)
    assert not own.path.parent.exists()
    assert reader.is_removed
    assert reader.find(0, b"k" * 32) == 2
    reader.close()


def test_a_region_that_was_adopted_meanwhile_stays(regions: Regions) -> None:
    path = regions.make_ended(0)
    files = find_files()
    own = adopt(path, 0, LAYOUT)
    assert own is not None
    assert [is_gone for _, is_gone in remove_files(files)] == [False]
    assert path.exists()
    own.close()
    assert [is_gone for _, is_gone in remove_files(files)] == [True]
    assert [is_gone for _, is_gone in remove_files(files)] == [True], "it is gone already"


def test_empty_folders_are_removed(regions: Regions) -> None:
    make_folder(KEY)
    folder = regions.make(0, OTHER).path.parent
    remove_empty_folders()
    assert [path.name for path in folder.parent.iterdir()] == [f"kv+{OTHER}"]


def test_an_engine_without_memory_takes_the_region_that_was_used_longest_ago(
    regions: Regions,
) -> None:
    regions.make_ended(0, OTHER, hours=1)
    regions.make_ended(1, OTHER, hours=2)
    kept = make_folder(KEY)
    regions.make_ended(0, hours=9)
    assert collect_one(kept)
    assert regions.find().keys() == {f"{OTHER}/0", f"{KEY}/0"}
    assert collect_one(kept)
    assert not collect_one(kept)


def test_a_region_of_another_version_is_refused_by_name(regions: Regions) -> None:
    own = regions.make(0)
    os.pwrite(own.fd, (99).to_bytes(8, "little"), 8)
    with pytest.raises(ProtocolMismatchError):
        Region.open(own.path, 0)
    assert "version 99" in regions.find()[f"{KEY}/0"].problem
