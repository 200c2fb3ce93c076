"""SharedTier and Store: engines of a folder lend each other blocks, and reuse only unread ones."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.shared_regions import Member, key_of, layout_of

from shmllm.errors import NoSpaceError, SegmentError
from shmllm.shared_kv import own_region, region_files
from shmllm.shared_kv.layout import PINS_OF_OFFSET
from shmllm.shared_kv.own_region import OwnRegion
from shmllm.shared_kv.region_files import adopt, create, remove
from shmllm.shared_kv.tier import SharedTier
from shmllm.sigbus import bus_guard

Join = Callable[..., Member]


def test_a_saved_block_is_read_by_its_engine_and_by_others(join_folder: Join) -> None:
    first, second = join_folder(0), join_folder(1)
    assert first.save("a", "b") == [True, True]
    assert second.finds("a")
    borrowed = [first.borrow("a"), second.borrow("a"), second.borrow("b")]
    assert None not in borrowed
    assert (first.tier.num_lent, second.tier.num_lent) == (1, 2)
    assert second.borrow("c") is None


def test_sections_are_apart(join_folder: Join) -> None:
    first, second = join_folder(0, layout_of(16, 8)), join_folder(1, layout_of(8, 16))
    first.save("a")
    first.save("a", section=1)
    first.save("b", section=1)
    for section in (0, 1):
        block_id = second.borrow("a", section)
        assert block_id is not None
        second.tier.give_back(section, block_id)
    assert not second.finds("b", 0)
    assert second.finds("b", 1)


def test_what_another_engine_has_is_not_saved_again(join_folder: Join) -> None:
    first, second = join_folder(0), join_folder(1)
    first.save("a")
    second.tier.refresh()
    assert second.save("a", "b") == [False, True]


def test_a_key_that_is_reserved_twice_is_published_once(join_folder: Join) -> None:
    member = join_folder(0, layout_of(8))
    twice = member.tier.reserve([(0, key_of("a")), (0, key_of("a"))])
    for block_id in twice:
        assert block_id is not None
        member.memory.write(0, block_id, key_of("a"))
        member.tier.publish(0, block_id)
    assert (member.tier.num_readable, member.tier.stats.saved) == (1, 1)
    assert member.save(*range(7)) == [True] * 7, "the other block is free"
    assert member.finds("a")


def test_the_least_recently_used_blocks_give_way(join_folder: Join) -> None:
    member = join_folder(0, layout_of(8))
    member.save(*range(8))
    block_id = member.borrow(0)
    assert block_id is not None
    member.tier.give_back(0, block_id)
    member.save("new", "newer")
    assert [n for n in range(8) if member.finds(n)] == [0, 3, 4, 5, 6, 7]
    assert member.tier.stats.reused == 2


@pytest.mark.parametrize("reader", [0, 1])
def test_blocks_that_are_read_are_not_reused(join_folder: Join, reader: int) -> None:
    members = [join_folder(0, layout_of(8)), join_folder(1)]
    members[0].save(*range(8))
    members[reader].tier.refresh()
    held = [members[reader].borrow(n) for n in range(5)]
    assert members[0].save(*"abcdefgh") == [True] * 3 + [False] * 5
    for n, block_id in enumerate(held):
        assert block_id is not None
        assert members[reader].memory.has(0, block_id, key_of(n))
        members[reader].tier.give_back(0, block_id)
    assert members[0].save(*"defgh") == [True] * 5


@pytest.mark.parametrize("joins_late", [False, True])
def test_a_reader_that_comes_between_both_looks_is_seen(
    join_folder: Join, monkeypatch: pytest.MonkeyPatch, joins_late: bool
) -> None:
    """Before the block is invalid, in the moment after the owner has looked at the pins."""
    owner = join_folder(0, layout_of(8))
    owner.save(*range(8))
    readers = [] if joins_late else [join_folder(1)]
    for each in readers:
        each.tier.refresh()
    invalidate = OwnRegion.invalidate

    def late(self: OwnRegion, section: int, block: int) -> None:
        monkeypatch.undo()
        if joins_late:
            readers.append(join_folder(1))
        assert readers[0].borrow(0) is not None
        invalidate(self, section, block)

    monkeypatch.setattr(OwnRegion, "invalidate", late)
    assert owner.save("new") == [False]
    assert readers[0].tier.num_lent == 1
    assert owner.finds(0)
    assert owner.save("new") == [True], "another block gives way the next time"


def test_pins_of_a_dead_engine_count_nothing(join_folder: Join, folder: Path) -> None:
    owner = join_folder(0, layout_of(8))
    owner.save(*range(8))
    dead = Member(folder / "1")
    assert all(dead.borrow(n) is not None for n in range(8))
    assert owner.save("new") == [False]
    dead.close()
    assert owner.save("new") == [True]


def test_the_next_owner_finds_the_blocks(join_folder: Join, folder: Path) -> None:
    layout = layout_of(8)
    first, reader = Member(folder / "0", layout), join_folder(1)
    first.save(*range(8))
    reader.tier.refresh()
    held = reader.borrow(3)
    assert held is not None
    first.close()
    second = join_folder(adopt(folder / "0", 0, layout))
    assert all(second.finds(n) for n in range(8))
    assert second.save(*"abcdefgh").count(True) == 7
    assert reader.memory.has(0, held, key_of(3))
    assert reader.finds("a")
    assert reader.tier.num_lent == 1


def test_a_block_that_a_killed_owner_has_invalidated_waits_for_its_reader(
    join_folder: Join, folder: Path
) -> None:
    layout = layout_of(8)
    first, reader = Member(folder / "0", layout), join_folder(1)
    first.save(*range(8))
    reader.tier.refresh()
    held = reader.borrow(3)
    assert held is not None
    for block in range(8):
        first.region.invalidate(0, block)
    first.close()
    second = join_folder(adopt(folder / "0", 0, layout))
    assert second.save(*"abcdefgh").count(True) == 7
    assert reader.memory.has(0, held, key_of(3))
    reader.tier.give_back(0, held)
    assert second.save("h") == [True]


def test_two_valid_blocks_of_one_key_after_damage_do_not_mix(
    join_folder: Join, folder: Path
) -> None:
    layout = layout_of(8)
    first = Member(folder / "0", layout)
    first.save("a", "b")
    begin = layout.tables[0].keys
    blocks = dict(zip("ab", [number for number, _ in first.region.entries(0)], strict=True))
    os.pwrite(first.region.fd, key_of("a") * 2, begin + 32 * min(blocks.values()))
    first.close()
    second = join_folder(adopt(folder / "0", 0, layout))
    assert len(second.region.entries(0)) == second.tier.num_readable == 1


@pytest.mark.parametrize("how", ["leave", "remove"])
def test_who_leaves_keeps_its_loans_until_they_are_given_back(
    join_folder: Join, folder: Path, how: str
) -> None:
    owner, reader = join_folder(0, layout_of(8)), Member(folder / "1")
    owner.save(*range(8))
    reader.tier.refresh()
    held = reader.borrow(3)
    assert held is not None
    getattr(reader.tier, how)()
    assert not reader.tier.contains(0, key_of(4))
    assert reader.borrow(4) is None
    assert reader.tier.reserve([(0, key_of("x"))]) == [None]
    assert owner.save(*"abcdefgh").count(True) == 7
    assert reader.memory.has(0, held, key_of(3))
    reader.tier.give_back(0, held)
    assert reader.memory.num_mapped == 0
    assert (folder / "1").exists() == (how == "leave")
    assert owner.save("h") == [True]


def test_who_leaves_may_still_be_writing(folder: Path) -> None:
    """A step that was submitted before writes into the region."""
    member = Member(folder / "0", layout_of(8))
    [block_id] = member.tier.reserve([(0, key_of("a"))])
    assert block_id is not None
    member.tier.leave()
    assert member.memory.num_mapped == 1
    member.memory.write(0, block_id, key_of("a"))
    member.tier.publish(0, block_id)
    assert member.memory.num_mapped == 0
    again = Member(adopt(folder / "0", 0, layout_of(8)))  # type: ignore[arg-type]
    assert not again.finds("a")
    again.close()


def test_close_ends_all_at_once(folder: Path, join_folder: Join) -> None:
    member, other = Member(folder / "0"), join_folder(1)
    other.save("a")
    member.tier.refresh()
    held = member.borrow("a")
    assert held is not None
    member.tier.reserve([(0, key_of("b"))])
    member.close()
    member.tier.give_back(0, held)
    member.close()
    assert not region_files.is_owned(folder / "0")


def test_remove_gives_the_memory_back(folder: Path, join_folder: Join) -> None:
    owner, reader = Member(folder / "0", layout_of(64)), join_folder(1)
    owner.save(*range(64))
    reader.tier.refresh()
    held = reader.borrow(0)
    assert held is not None
    fd = os.dup(owner.region.fd)
    before = os.fstat(fd).st_blocks
    owner.tier.remove()
    assert (before - os.fstat(fd).st_blocks) * 512 >= layout_of(64).data_bytes - 3 * 4096
    os.close(fd)
    assert not (folder / "0").exists()
    assert reader.memory.has(0, held, key_of(0))


def test_clear_forgets_what_nobody_reads(join_folder: Join) -> None:
    owner, reader = join_folder(0), join_folder(1)
    owner.save(*range(8))
    reader.tier.refresh()
    assert reader.borrow(3) is not None
    owner.tier.clear()
    assert [n for n in range(8) if reader.finds(n)] == [3]
    assert owner.save(*range(8)).count(True) == 7


@pytest.mark.parametrize("is_lent", [False, True])
def test_a_region_that_loses_its_name_goes_when_it_is_read_no_more(
    join_folder: Join, folder: Path, is_lent: bool
) -> None:
    dead, reader = Member(folder / "0"), join_folder(1)
    dead.save("a")
    reader.tier.refresh()
    held = reader.borrow("a") if is_lent else None
    dead.close()
    assert remove(folder / "0")
    reader.tier.refresh()
    assert reader.memory.num_mapped == 1 + is_lent
    if held is not None:
        assert reader.memory.has(0, held, key_of("a"))
        reader.tier.give_back(0, held)
        reader.tier.refresh()
        assert reader.memory.num_mapped == 1
    assert not reader.finds("a")


def test_pins_count_although_somebody_has_removed_the_name(join_folder: Join, folder: Path) -> None:
    owner, reader = join_folder(0, layout_of(8)), join_folder(1)
    owner.save(*range(8))
    reader.tier.refresh()
    owner.tier.refresh()
    held = reader.borrow(3)
    assert held is not None
    os.unlink(folder / "1")
    for _ in range(2):
        owner.tier.refresh()
        owner.save(*"abcdefgh")
    assert reader.memory.has(0, held, key_of(3))
    third = join_folder(1)
    third.save("third")
    assert owner.finds("third"), "another region can have the place"


def test_a_region_of_another_shape_lends_nothing_and_its_pins_count(
    join_folder: Join, folder: Path
) -> None:
    first, other = join_folder(0, layout_of(16, 8)), join_folder(1, layout_of(16))
    first.save("a")
    assert not other.finds("a")
    assert other.problems == []


def test_without_memory_for_pins_a_region_is_read_later(
    join_folder: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = join_folder(0), join_folder(1)
    second.save("a")

    def full(*_: Any) -> None:
        raise NoSpaceError("shared memory is full")

    with monkeypatch.context() as patch:
        patch.setattr(own_region, "allocate", full)
        assert not first.finds("a")
    assert first.finds("a")
    assert first.problems == []


DAMAGES = {
    "magic": lambda layout: (0, b"\1"),
    "sections": lambda layout: (16, b"\7"),
    "index": lambda layout: (layout.tables[0].index, b"\xff" * 4096),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("is_alive", [True, False])
def test_damage_is_reported_once_and_ends_sharing(
    join_folder: Join, folder: Path, name: str, is_alive: bool
) -> None:
    layout = layout_of()
    damaged = Member(folder / "0", layout)
    damaged.save("a")
    at, data = DAMAGES[name](layout)
    os.pwrite(damaged.region.fd, data, at)
    if not is_alive:
        damaged.close()
    reader = join_folder(1)
    for _ in range(3):
        reader.finds("a")
        reader.borrow("a")
        reader.save("b")
    if name == "index" or is_alive:
        assert len(reader.problems) == 1
        assert str(folder / "0") in reader.problems[0]
        assert not reader.tier.is_open
        assert reader.memory.num_mapped == 0
    else:
        assert reader.problems == []
        assert reader.finds("b")
    if is_alive:
        damaged.close()


def test_random_damage_never_gives_another_key(join_folder: Join, folder: Path) -> None:
    """Each part of the tables, of a region whose owner lives. Blocks are not being written."""
    rng = random.Random(3)
    layout = layout_of(64, 16)
    tables = layout.tables[0]
    parts = {
        "header": (0, 256),
        "pins of": (PINS_OF_OFFSET, PINS_OF_OFFSET + 256),
        "generations": (tables.generations, tables.keys),
        "keys": (tables.keys, tables.index),
        "index": (tables.index, layout.tables[1].generations),
        "pins": (layout.pins_offset, layout.pins_offset + 4096),
    }
    for name, (begin, end) in parts.items():
        for _ in range(8):
            owner = Member(folder / "0", layout)
            owner.save(*range(64))
            early = Member(folder / "1", layout)
            for _ in range(rng.choice([1, 9, 200])):
                os.pwrite(owner.region.fd, rng.randbytes(3), rng.randrange(begin, end - 3))
            late = Member(folder / "2", layout)
            for member in (early, late):
                for n in range(64):
                    held = member.borrow(n)  # which compares the data
                    if held is not None:
                        member.tier.give_back(0, held)
                member.save("own")
                assert len(member.problems) <= 1, name
            owner.tier.clear()
            for member in (late, early, owner):
                member.close()
                remove(member.region.path)


def test_too_many_mappings_are_no_crash(join_folder: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = join_folder(0)
    other = join_folder(1)

    def refuse(_: Any) -> None:
        raise SegmentError("too many")

    monkeypatch.setattr(bus_guard, "guard", refuse)
    reader.tier.refresh()
    reader.tier.refresh()
    assert len(reader.problems) == 1
    assert not reader.tier.is_open
    monkeypatch.undo()
    assert other.finds("a") is False


def test_a_region_that_cannot_be_mapped_is_closed(folder: Path) -> None:
    class Full:
        def map(self, *_: Any) -> Any:
            raise OSError(12, "Cannot allocate memory")

        def unmap(self, *_: Any) -> None:
            raise AssertionError

    region = create(folder, layout_of(), [0])
    with pytest.raises(SegmentError, match="Cannot allocate memory"):
        SharedTier(region, Full(), print)
    assert not region_files.is_owned(folder / "0")


def test_an_engine_whose_region_has_lost_its_name_shares_nothing_more(
    folder: Path, join_folder: Callable[..., Member]
) -> None:
    """Engines that join later would not see its pins."""
    first, second = join_folder(0), join_folder(1)
    assert first.save("a") == [True]
    held = second.tier.borrow(0, key_of("a"))
    assert held is not None
    (folder / "1").unlink()
    assert not second.finds("a")
    assert len(second.problems) == 1
    assert "somebody has removed" in second.problems[0]
    assert second.memory.has(0, held, key_of("a")), "what is lent stays so"
    second.tier.give_back(0, held)
