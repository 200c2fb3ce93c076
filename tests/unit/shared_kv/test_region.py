"""A region as its owner and as readers see it: generations, keys, the index, pins, and owners."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.shared_regions import key_of, layout_of

from shmllm.errors import IpcError, ProtocolMismatchError, SegmentError
from shmllm.shared_kv import own_region, region_files
from shmllm.shared_kv.layout import DESCRIPTION_OFFSET
from shmllm.shared_kv.own_region import OwnRegion
from shmllm.shared_kv.region import Region
from shmllm.shared_kv.region_files import adopt, create, is_owned, remove

Make = Callable[..., Any]


@pytest.fixture
def closing() -> Iterator[Make]:
    """Closes regions at the end of a test."""
    made: list[Region] = []

    def note(region: Region) -> Region:
        made.append(region)
        return region

    yield note
    for each in made:
        each.close()


@pytest.fixture
def own(folder: Path, closing: Make) -> OwnRegion:
    found: OwnRegion = closing(create(folder, layout_of(16, 8), [0]))
    return found


@pytest.fixture
def reader(folder: Path, closing: Make) -> OwnRegion:
    """Another engine's region."""
    found: OwnRegion = closing(create(folder, layout_of(24), [5]))
    return found


@pytest.fixture
def view(own: OwnRegion, closing: Make) -> Region:
    """The first region, as the other engine sees it."""
    found: Region = closing(Region.open(own.path, own.place))
    return found


def test_a_published_block_is_found_by_its_key(own: OwnRegion, view: Region) -> None:
    assert view.find(0, key_of(1)) is None
    assert own.publish(0, 3, key_of(1))
    assert view.find(0, key_of(1)) == 3
    assert view.find(1, key_of(1)) is None, "sections have keys of their own"
    assert own.entries(0) == [(3, key_of(1))]
    assert (view.num_valid(0), view.num_valid(1)) == (1, 0)


def test_an_invalid_block_is_not_found_until_it_is_restored(own: OwnRegion, view: Region) -> None:
    own.publish(0, 3, key_of(1))
    before = view.generation(0, 3)
    own.invalidate(0, 3)
    assert view.find(0, key_of(1)) is None
    assert own.invalidated(0) == [3]
    own.restore(0, 3)
    assert view.find(0, key_of(1)) == 3
    assert view.generation(0, 3) > before, "a reader between both notices it"


def test_a_forgotten_block_can_get_another_key(own: OwnRegion, view: Region) -> None:
    own.publish(0, 3, key_of(1))
    own.invalidate(0, 3)
    own.forget(0, 3)
    own.publish(0, 3, key_of(2))
    assert (view.find(0, key_of(1)), view.find(0, key_of(2))) == (None, 3)


def test_a_full_bucket_refuses_a_key(own: OwnRegion, view: Region) -> None:
    same = [bytes(8) + bytes((n,)) * 24 for n in range(1, 10)]
    assert [own.publish(0, n, key) for n, key in enumerate(same)] == [True] * 8 + [False]
    assert view.find(0, same[8]) is None
    assert view.generation(0, 8) == 0
    own.invalidate(0, 2)
    own.forget(0, 2)
    assert own.publish(0, 8, same[8])
    assert view.find(0, same[8]) == 8


def test_a_pin_is_seen_by_the_owner(
    own: OwnRegion, view: Region, reader: OwnRegion, closing: Make
) -> None:
    readers_table = closing(Region.open(reader.path, reader.place))
    own.publish(0, 3, key_of(1))
    reader.keep_pins_of(view)
    assert reader.pin(view, 0, 3, key_of(1))
    assert readers_table.pins(own.place, 0, 3)
    others = [(own.place, 0, 2), (own.place, 1, 3), (4, 0, 3)]
    assert not any(readers_table.pins(*each) for each in others)
    reader.unpin(own.place, 0, 3)
    assert not readers_table.pins(own.place, 0, 3)


@pytest.mark.parametrize("change", ["invalidated", "another key", "never published"])
def test_a_block_that_changed_is_not_pinned(
    own: OwnRegion, view: Region, reader: OwnRegion, change: str
) -> None:
    reader.keep_pins_of(view)
    if change != "never published":
        own.publish(0, 3, key_of(1))
        own.invalidate(0, 3)
    if change == "another key":
        own.forget(0, 3)
        own.publish(0, 3, key_of(2))
    assert not reader.pin(view, 0, 3, key_of(1))
    assert not reader.pins(own.place, 0, 3)


@pytest.mark.parametrize("restored", [False, True])
def test_a_block_that_changes_while_it_is_pinned_is_refused(
    own: OwnRegion,
    view: Region,
    reader: OwnRegion,
    restored: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if it was restored meanwhile: the owner may have looked at the pin too early."""
    own.publish(0, 3, key_of(1))
    reader.keep_pins_of(view)

    def meanwhile() -> None:
        assert reader.pins(own.place, 0, 3), "the pin comes before the second look"
        monkeypatch.undo()
        own.invalidate(0, 3)
        if restored:
            own.restore(0, 3)

    monkeypatch.setattr(own_region, "fence", meanwhile)
    assert not reader.pin(view, 0, 3, key_of(1))
    assert not reader.pins(own.place, 0, 3)


def test_pins_without_memory_count_nothing(own: OwnRegion, view: Region, reader: OwnRegion) -> None:
    own.publish(0, 3, key_of(1))
    reader.keep_pins_of(view)
    reader.pin(view, 0, 3, key_of(1))
    reader.drop_pins_of(own.place)
    assert not reader.pins(own.place, 0, 3)
    reader.keep_pins_of(view)
    assert not reader.pins(own.place, 0, 3), "pins of an earlier region at the place are gone"


def test_a_region_has_one_owner(own: OwnRegion) -> None:
    assert own.is_owned
    assert is_owned(own.path)
    assert adopt(own.path, 0, own.layout) is None
    assert not remove(own.path)
    with pytest.raises(FileExistsError):
        create(own.path.parent, own.layout, [0])


def test_a_region_outlives_its_owner(folder: Path, closing: Make) -> None:
    path, layout = folder / "0", layout_of(16, 8)
    first = create(folder, layout, [0])
    first.publish(0, 3, key_of(1))
    first.publish(1, 4, key_of(2))
    view = closing(Region.open(path, 0))
    first.close()
    assert not view.is_owned
    assert not is_owned(path)
    assert view.find(0, key_of(1)) == 3
    second = closing(adopt(path, 0, layout))
    assert view.is_owned
    assert second.entries(0) == [(3, key_of(1))]
    assert second.entries(1) == [(4, key_of(2))]


def test_only_the_same_layout_is_adopted(folder: Path) -> None:
    create(folder, layout_of(16), [0]).close()
    assert adopt(folder / "0", 0, layout_of(24)) is None
    assert not is_owned(folder / "0")


def test_who_adopts_a_region_has_no_pins(
    own: OwnRegion, view: Region, folder: Path, closing: Make
) -> None:
    own.publish(0, 3, key_of(1))
    killed = create(folder, layout_of(), [5])
    killed.keep_pins_of(view)
    assert killed.pin(view, 0, 3, key_of(1))
    killed.close()
    adopted = closing(adopt(folder / "5", 5, layout_of()))
    assert not adopted.pins(own.place, 0, 3)


def test_adoption_mends_the_index(folder: Path, closing: Make) -> None:
    layout = layout_of()
    first = create(folder, layout, [0])
    first.publish(0, 3, key_of(1))
    first.close()
    rng, begin = random.Random(1), layout.tables[0].index
    with open(folder / "0", "r+b") as file:
        file.seek(begin)
        file.write(rng.randbytes(layout.sections[0].num_buckets * 32))
    view = closing(Region.open(folder / "0", 0))
    with pytest.raises(ProtocolMismatchError, match=r"index has block [\d,]+ of 16"):
        view.find(0, key_of(1))
    closing(adopt(folder / "0", 0, layout))
    assert view.find(0, key_of(1)) == 3


@pytest.mark.parametrize("generation", [0, 1, 2, 2**64 - 2, 2**64 - 1])
def test_generations_go_on_after_damage(folder: Path, closing: Make, generation: int) -> None:
    """A block is valid after `publish` and `restore`, and invalid after `invalidate`."""
    own = closing(create(folder, layout_of(), [0]))
    at = own.layout.tables[0].generations + 8 * 3
    for change, is_valid in (("invalidate", False), ("restore", True)):
        with open(own.path, "r+b") as file:
            file.seek(at)
            file.write(generation.to_bytes(8, "little"))
        getattr(own, change)(0, 3)
        found = own.generation(0, 3)
        assert found != generation or change == "invalidate"
        assert (found % 2 == 0 and found != 0) == is_valid
    own.invalidate(0, 3)
    assert own.publish(0, 3, key_of(1))
    assert own.find(0, key_of(1)) == 3


def test_a_removed_region_stays_for_its_readers(folder: Path, closing: Make) -> None:
    first = create(folder, layout_of(), [0])
    first.publish(0, 3, key_of(1))
    first.close()
    view = closing(Region.open(folder / "0", 0))
    assert remove(folder / "0")
    assert remove(folder / "0"), "it is gone already"
    assert not (folder / "0").exists()
    assert view.is_removed
    assert view.find(0, key_of(1)) == 3


def test_who_sweeps_a_region_keeps_others_away(folder: Path) -> None:
    create(folder, layout_of(), [0]).close()
    with open(folder / "0", "r+b") as file:
        sweeping = region_files.lock_sweeper(file.fileno())
        assert sweeping is not None
        assert adopt(folder / "0", 0, layout_of()) is None
        assert not remove(folder / "0")
        os.close(sweeping)
    assert remove(folder / "0")


def test_a_region_takes_away_its_own_name_only(folder: Path, closing: Make) -> None:
    own = closing(create(folder, layout_of(), [0]))
    os.unlink(folder / "0")
    own.unlink()
    other = closing(create(folder, layout_of(), [0]))
    own.unlink()
    assert (folder / "0").exists()
    other.unlink()
    assert not (folder / "0").exists()


def test_a_region_has_all_memory_but_that_of_pins(own: OwnRegion) -> None:
    layout, used = own.layout, os.fstat(own.fd).st_blocks * 512
    assert used == layout.pins_offset + layout.data_bytes
    assert stat.S_IMODE(os.fstat(own.fd).st_mode) == 0o600


def test_memory_of_blocks_goes_back(own: OwnRegion) -> None:
    os.pwrite(own.fd, b"x" * own.layout.data_bytes, own.layout.data_offset)
    before = os.fstat(own.fd).st_blocks
    own.give_memory_back(0, 8, 8)
    assert (before - os.fstat(own.fd).st_blocks) * 512 == 2 * 4096
    begin, half = own.layout.data_offset, 8 * 512
    assert os.pread(own.fd, half, begin) == b"x" * half
    assert os.pread(own.fd, half, begin + half) == bytes(half)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"[" * 3000, b"\xff", b'"x"', b'{"a": 1}'])
def test_a_description_is_a_dictionary(own: OwnRegion, view: Region, text: bytes) -> None:
    os.pwrite(own.fd, text.ljust(3000, b"\0"), DESCRIPTION_OFFSET)
    assert view.description == ({"a": 1} if text == b'{"a": 1}' else {})


def test_a_description_is_read_as_it_was_written(own: OwnRegion, view: Region) -> None:
    own.describe({"model": "ü" * 10_000})
    own.describe({"model": "ü"})
    assert view.description == {"model": "ü"}


@pytest.mark.parametrize("size", [0, 4095, 4096, 100_000, "one less", "one more"])
def test_a_file_of_another_size_is_refused(folder: Path, size: Any) -> None:
    layout = layout_of()
    create(folder, layout, [0]).close()
    whole = layout.data_offset + layout.data_bytes
    os.truncate(folder / "0", {"one less": whole - 1, "one more": whole + 1}.get(size, size))
    for opening in (Region.open, lambda *where: adopt(*where, layout)):
        with pytest.raises(ProtocolMismatchError, match="damaged: it has"):
            opening(folder / "0", 0)
    assert not is_owned(folder / "0")


@pytest.mark.parametrize("kind", ["link", "directory", "fifo"])
def test_what_is_no_regular_file_is_refused(folder: Path, kind: str) -> None:
    create(folder, layout_of(), [1]).close()
    path = folder / "0"
    make: dict[str, Callable[[], Any]] = {
        "link": lambda: path.symlink_to(folder / "1"),
        "directory": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
    }
    make[kind]()
    with pytest.raises((OSError, IpcError)):
        Region.open(path, 0)
    with pytest.raises((OSError, IpcError)):
        adopt(path, 0, layout_of())
    if kind != "fifo":
        with pytest.raises(SegmentError):
            remove(path)


def test_a_region_needs_a_layout_of_this_version(folder: Path) -> None:
    create(folder, layout_of(), [0]).close()
    with open(folder / "0", "r+b") as file:
        file.seek(8)
        file.write((7).to_bytes(8, "little"))
    with pytest.raises(ProtocolMismatchError, match="version 7"):
        Region.open(folder / "0", 0)


def test_random_headers_never_map_a_region_of_another_size(folder: Path) -> None:
    layout = layout_of()
    create(folder, layout, [0]).close()
    rng, words = random.Random(2), layout.header()
    for _ in range(300):
        changed = [*words]
        for _ in range(rng.choice([1, 1, 2, 9])):
            at = rng.randrange(len(changed))
            changed[at] = rng.choice([0, 1, 2**63, rng.getrandbits(64), changed[at] + 8])
        with open(folder / "0", "r+b") as file:
            file.write(b"".join((each % 2**64).to_bytes(8, "little") for each in changed))
        try:
            region = Region.open(folder / "0", 0)
        except ProtocolMismatchError:
            continue
        assert region.layout.data_bytes == layout.data_bytes
        region.close()


def test_a_forked_child_keeps_no_lock_and_changes_nothing(
    own: OwnRegion, view: Region, reader: OwnRegion
) -> None:
    own.publish(0, 3, key_of(1))
    reader.keep_pins_of(view)
    assert reader.pin(view, 0, 3, key_of(1))
    reading, writing = os.pipe()
    told, telling = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(writing)
            reader.unpin(own.place, 0, 3)
            own.invalidate(0, 3)
            own.unlink()
            os.write(telling, b"x")
            os.read(reading, 1)
        finally:
            os._exit(0)
    try:
        os.close(reading)
        os.close(telling)
        assert os.read(told, 1) == b"x"
        os.close(told)
        assert reader.pins(own.place, 0, 3)
        assert view.find(0, key_of(1)) == 3
        own.close()
        assert not view.is_owned, "the child has the lock"
        again = adopt(view.path, 0, view.layout)
        assert again is not None
        again.close()
    finally:
        os.close(writing)
        assert os.waitpid(child, 0)[1] == 0
        own.__dict__["close"] = lambda: None  # the fixture would close it again


def test_a_truncated_region_of_a_reader_counts_as_pinned(
    folder: Path, own: OwnRegion, reader: OwnRegion
) -> None:
    """In a process that survives SIGBUS, which is a child here."""
    child = os.fork()
    if child == 0:
        try:
            from shmllm.sigbus import bus_guard

            if not bus_guard.install():
                os._exit(0)
            seen = Region.open(reader.path, 5)
            assert not seen.pins(0, 0, 3)
            os.truncate(reader.path, 0)
            os._exit(0 if seen.pins(0, 0, 3) and seen.is_lost else 3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_index_has_room_for_all_blocks(folder: Path) -> None:
    rng = random.Random(1)
    own = create(folder, layout_of(4096), [9])
    try:
        for block in range(4096):
            assert own.publish(0, block, rng.randbytes(32))
    finally:
        own.close()


def test_a_region_that_loses_its_name_at_the_last_moment_is_not_adopted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner removes it and ends after the adopter has opened it."""
    path = folder / "9"
    create(folder, layout_of(16), [9]).close()
    lock = vars(region_files)["_lock"]

    def late(fd: int) -> int | None:
        path.unlink()
        found: int | None = lock(fd)
        return found

    monkeypatch.setattr(region_files, "_lock", late)
    assert adopt(path, 9, layout_of(16)) is None
