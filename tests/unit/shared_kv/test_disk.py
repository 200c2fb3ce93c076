"""Copies of shared blocks on disk: the file, the thread that writes it, the tier that reads it."""

from __future__ import annotations

import fcntl
import os
import random
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.waiting import wait_until

from shmllm.config.engine import EngineConfig
from shmllm.errors import EngineStartError, ProtocolMismatchError
from shmllm.frontend.options.engine_options import make_engine_config
from shmllm.ipc.segment import set_lock
from shmllm.shared_kv import disk as disk_module
from shmllm.shared_kv.block_io import read_block, write_block
from shmllm.shared_kv.disk import Disk
from shmllm.shared_kv.disk_file import DiskFile
from shmllm.shared_kv.disk_folder import check_directory, file_path, make_room
from shmllm.shared_kv.disk_layout import (
    ENTRY_BYTES,
    HEADER_BYTES,
    PAGE_BYTES,
    SLOTS_PER_GROUP,
    USER_BYTE,
    WRITER_BYTE,
)
from shmllm.shared_kv.layout import RegionLayout, Section
from shmllm.shared_kv.own_region import OwnRegion
from shmllm.shared_kv.region_files import create
from shmllm.shared_kv.tier import SharedTier

KEY = "0123456789abcdef"
OTHER = "fedcba9876543210"
PARTS = 3
NUM_BLOCKS = 4
BLOCK_BYTES = PARTS * PAGE_BYTES
LAYOUT = RegionLayout((Section(NUM_BLOCKS, PARTS, PAGE_BYTES), Section(0, 0, 0)))
PLENTY = 2**30


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "little") * 8


def data_of(number: int, size: int = BLOCK_BYTES) -> bytes:
    return random.Random(number).randbytes(size)


@contextmanager
def opened(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[DiskFile]:
    file = DiskFile(path, KEY, 0, block_bytes)
    try:
        yield file
    finally:
        file.close()


def write(file: DiskFile, *numbers: int, may_grow: bool = True) -> None:
    assert file.try_lock()
    for number in numbers:
        assert file.write(key_of(number), memoryview(data_of(number, file.block_bytes)), may_grow)
    file.unlock()


def read(file: DiskFile, number: int) -> bool | None:
    target = memoryview(bytearray(file.block_bytes))
    found = file.read(key_of(number), target)
    assert not found or target == data_of(number, file.block_bytes)
    return found


def numbers_in(file: DiskFile) -> list[int]:
    return sorted(int.from_bytes(key[:4], "little") for key in file.records)


def entry_offset(slot: int) -> int:
    assert slot < SLOTS_PER_GROUP
    return HEADER_BYTES + slot * ENTRY_BYTES


def data_offset(slot: int) -> int:
    return HEADER_BYTES + PAGE_BYTES + slot * BLOCK_BYTES


def flip(path: Path, offset: int) -> None:
    fd = os.open(path, os.O_RDWR)
    (byte,) = os.pread(fd, 1, offset)
    os.pwrite(fd, bytes((byte ^ 1,)), offset)
    os.close(fd)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return file_path(tmp_path, KEY, 0)


# the file


@pytest.mark.parametrize("block_bytes", [1, PAGE_BYTES, PAGE_BYTES + 1, BLOCK_BYTES])
@pytest.mark.parametrize("count", [1, SLOTS_PER_GROUP, SLOTS_PER_GROUP + 1])
def test_what_is_written_is_found_by_another_process_and_read(
    path: Path, block_bytes: int, count: int
) -> None:
    with opened(path, block_bytes) as file, opened(path, block_bytes) as other:
        write(file, *range(count))
        assert other.is_changed
        other.scan()
        for each in (file, other):
            assert numbers_in(each) == [*range(count)]
            assert each.num_slots == count
            assert all(read(each, number) for number in range(count))
            assert read(each, count) is False
    with opened(path, block_bytes) as file:
        assert all(read(file, number) for number in range(count))


def test_only_one_writes_at_a_time_and_each_continues_behind_the_other(path: Path) -> None:
    with opened(path) as file, opened(path) as other:
        assert file.try_lock()
        assert not other.try_lock()
        file.unlock()
        write(file, 1)
        write(other, 2)
        write(file, 3)
        assert numbers_in(file) == [1, 2, 3]
        assert all(read(file, number) for number in (1, 2, 3))


def test_the_record_used_longest_ago_gives_way(path: Path) -> None:
    with opened(path) as file:
        write(file, 1, 2, 3)
        assert file.try_lock()
        file.touch(key_of(1))
        file.unlock()
        write(file, 4, may_grow=False)
        assert numbers_in(file) == [1, 3, 4]
        write(file, 5, 6, may_grow=False)
        assert numbers_in(file) == [4, 5, 6]
        assert file.num_slots == 3
    with opened(path) as file:
        assert numbers_in(file) == [4, 5, 6]
        write(file, 7, may_grow=False)
        assert numbers_in(file) == [5, 6, 7]


def test_a_file_without_slots_that_may_not_grow_takes_nothing(path: Path) -> None:
    with opened(path) as file:
        assert not file.write(key_of(1), memoryview(data_of(1)), may_grow=False)


def test_a_record_that_another_process_has_overwritten_is_gone_and_not_damaged(path: Path) -> None:
    with opened(path) as file:
        write(file, 1)
        with opened(path) as other:
            write(other, 2, may_grow=False)
        assert numbers_in(file) == [1]
        assert read(file, 1) is False
        file.scan()
        assert read(file, 2)


def test_data_that_is_being_overwritten_is_never_read(path: Path) -> None:
    """A writer that was killed between the data's first byte and the entry."""
    with opened(path) as file:
        write(file, 1, 2)
        os.pwrite(file.fd, bytes(ENTRY_BYTES), entry_offset(0))
        os.pwrite(file.fd, b"torn", data_offset(0))
        assert read(file, 1) is False
        assert read(file, 2)
    with opened(path) as file:
        assert numbers_in(file) == [2]
        write(file, 3)
        assert file.num_slots == 2, "the slot is free"


@pytest.mark.parametrize("offset", [0, 1, BLOCK_BYTES - 1])
def test_a_flipped_byte_is_found_and_its_record_removed(path: Path, offset: int) -> None:
    with opened(path) as file:
        write(file, 1, 2)
        record = file.records[key_of(1)]
        flip(path, data_offset(record.slot) + offset)
        assert read(file, 1) is None
        assert read(file, 1) is False
        assert file.try_lock()
        file.discard(key_of(1), record)
        file.unlock()
        write(file, 3)
        assert (file.num_slots, numbers_in(file)) == (2, [2, 3])
        assert read(file, 3)


@pytest.mark.parametrize("byte", range(0, ENTRY_BYTES, 7))
def test_a_flipped_byte_in_an_entry_hides_its_record(path: Path, byte: int) -> None:
    with opened(path) as file:
        write(file, 1, 2)
    flip(path, entry_offset(0) + byte)
    with opened(path) as file:
        assert numbers_in(file) == [2]


@pytest.mark.parametrize("size", [HEADER_BYTES, data_offset(0), data_offset(2) - 1, data_offset(2)])
def test_a_truncated_file_has_the_records_that_are_left(path: Path, size: int) -> None:
    left = [number for number in range(3) if data_offset(number + 1) <= size]
    with opened(path) as before:
        write(before, 0, 1, 2)
        os.truncate(path, size)
        assert [number for number in range(3) if read(before, number)] == left
    with opened(path) as file:
        assert numbers_in(file) == left
        assert all(read(file, number) for number in left)
        write(file, *(number for number in range(3) if number not in left))
        assert all(read(file, number) for number in range(3))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x", "another kind of file"),
        (bytes(2 * HEADER_BYTES), "another kind of file"),
        (b"shmllmkv" + (99).to_bytes(4, "little") + bytes(99), "version 99, expected 1"),
    ],
)
def test_another_file_is_refused(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ProtocolMismatchError, match=message):
        DiskFile(path, KEY, 0, BLOCK_BYTES)
    assert path.read_bytes() == content


@pytest.mark.parametrize(("key", "section", "size"), [(OTHER, 0, 1), (KEY, 1, 1), (KEY, 0, 2)])
def test_a_file_of_other_blocks_is_refused(path: Path, key: str, section: int, size: int) -> None:
    with opened(path, 1):
        pass
    with pytest.raises(ProtocolMismatchError):
        DiskFile(path, key, section, size)


def test_a_file_that_others_may_write_is_refused(path: Path) -> None:
    with opened(path):
        pass
    path.chmod(0o666)
    with pytest.raises(PermissionError, match="others may write"):
        DiskFile(path, KEY, 0, BLOCK_BYTES)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to("x")])
def test_what_is_no_file_is_refused(path: Path, make: Callable[[Path], None]) -> None:
    make(path)
    with pytest.raises((OSError, ProtocolMismatchError)):
        DiskFile(path, KEY, 0, BLOCK_BYTES)


# the directory


def test_the_files_used_longest_ago_that_nobody_has_open_are_removed(tmp_path: Path) -> None:
    paths = [tmp_path / f"kv-{number:016x}.blocks" for number in range(4)]
    others = [tmp_path / "notes.txt", tmp_path / "kv-1.blocks"]
    for index, each in enumerate([*paths, *others]):
        each.write_bytes(bytes(1000))
        os.utime(each, (index, index))
    fd = os.open(paths[0], os.O_RDWR)
    assert set_lock(fd, USER_BYTE, fcntl.F_RDLCK)
    assert make_room(tmp_path, 5000, 1000) == 1000
    assert all(each.exists() for each in paths)
    assert make_room(tmp_path, 5000, 2000) == 2000
    assert [each.exists() for each in paths] == [True, False, True, True]
    assert make_room(tmp_path, 900, 100) == 0
    assert [each.exists() for each in paths] == [True, False, False, False]
    assert all(each.exists() for each in others)
    os.close(fd)


def test_a_directory_is_made(tmp_path: Path) -> None:
    check_directory(str(tmp_path / "a" / "b"))
    assert not [*(tmp_path / "a" / "b").iterdir()]


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineStartError, match=r"shared_kv_cache_path '.*' cannot be used: it is"):
        check_directory(str(tmp_path / "file"))
    with pytest.raises(EngineStartError, match="Not a directory"):
        check_directory(str(tmp_path / "file" / "below"))
    with pytest.raises(EngineStartError, match="cannot be used"):
        check_directory("/proc/shmllm")


def test_options_that_mean_nothing_without_others_are_refused(tmp_path: Path) -> None:
    def config(**options: object) -> EngineConfig:
        return make_engine_config("tiny", **options)

    with pytest.raises(EngineStartError, match="pass shared_kv_cache_bytes, too"):
        config(shared_kv_cache_path=str(tmp_path))
    with pytest.raises(EngineStartError, match="limit of shared_kv_cache_path"):
        config(shared_kv_cache_bytes=2**20, shared_kv_cache_path_bytes=2**20)
    for wrong in (1, "", b"x", "a\0b"):
        with pytest.raises(EngineStartError, match="path of a directory"):
            config(shared_kv_cache_bytes=2**20, shared_kv_cache_path=wrong)
    shared = config(shared_kv_cache_bytes=2**20, shared_kv_cache_path=Path("here")).shared_kv
    assert shared.path == os.path.abspath("here")
    assert shared.disk_bytes == 2**22
    again = config(
        shared_kv_cache_bytes=1, shared_kv_cache_path=tmp_path, shared_kv_cache_path_bytes="1KiB"
    ).shared_kv
    assert again.disk_bytes == 1024


# the tier


class FakeMemory:
    """Block ids that begin at 100."""

    def map(self, fd: int, layout: RegionLayout) -> tuple[int, ...]:
        return (100, 100)

    def unmap(self, firsts: Sequence[int]) -> None:
        pass


class Machine:
    """A folder of regions, and a directory on disk."""

    def __init__(self, root: Path) -> None:
        self.regions, self.directory = root / "shm" / f"kv+{KEY}", root / "disk"
        self.directory.mkdir()
        self.problems: list[str] = []
        self.tiers: list[SharedTier] = []
        self.disks: list[Disk] = []

    def region(self) -> OwnRegion:
        self.regions.mkdir(0o700, parents=True, exist_ok=True)
        return create(self.regions, LAYOUT)

    def start(self, limit: int = PLENTY) -> SharedTier:
        region = self.region()
        disk = Disk(self.directory, region, limit)
        tier = SharedTier(region, FakeMemory(), self.problems.append, disk=disk)
        self.tiers.append(tier)
        self.disks.append(disk)
        return tier

    def end(self) -> None:
        """All engines end, and shared memory is lost."""
        for disk, tier in zip(self.disks, self.tiers, strict=True):
            disk.finish(10)
            tier.leave()
            disk.join()
            assert not disk._thread.is_alive()
            self.problems += disk.take_problems()
        self.tiers, self.disks = [], []
        for each in self.regions.iterdir():
            each.unlink()

    def restart(self, limit: int = PLENTY) -> SharedTier:
        self.end()
        return self.start(limit)

    @property
    def file(self) -> Path:
        return file_path(self.directory, KEY, 0)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.end()


def save(tier: SharedTier, *numbers: int) -> None:
    for number in numbers:
        (block_id,) = tier.reserve([(0, key_of(number))])
        assert block_id is not None
        write_block(tier._own.fd, LAYOUT, 0, block_id - 100, memoryview(data_of(number)))
        tier.publish(0, block_id)


def flush(tier: SharedTier) -> Disk:
    disk = tier._disk
    assert isinstance(disk, Disk)
    disk.flush(10)
    return disk


def assert_lent(tier: SharedTier, number: int) -> int:
    assert tier.contains(0, key_of(number))
    block_id = tier.borrow(0, key_of(number))
    assert block_id is not None
    target = memoryview(bytearray(BLOCK_BYTES))
    assert read_block(tier._own, 0, key_of(number), target)
    assert target == data_of(number)
    return block_id


def test_blocks_are_found_after_shared_memory_is_lost(machine: Machine) -> None:
    save(machine.start(), 1, 2, 3)
    tier = machine.restart()
    assert not tier.num_readable
    assert not tier.contains(0, key_of(4))
    for number in (1, 2, 3):
        tier.give_back(0, assert_lent(tier, number))
    disk = flush(tier)
    assert (disk.num_read, disk.num_written, tier.num_readable) == (3, 0, 3)
    tier.give_back(0, assert_lent(tier, 1))
    assert disk.num_read == 3, "the region has it now"
    assert machine.problems == []


def test_blocks_that_had_to_give_way_come_back_from_disk(machine: Machine) -> None:
    tier = machine.start()
    for number in range(3 * NUM_BLOCKS):
        save(tier, number)
        flush(tier)
    for number in range(3 * NUM_BLOCKS):
        tier.give_back(0, assert_lent(tier, number))


def test_without_room_a_block_does_not_count_as_contained(machine: Machine) -> None:
    tier = machine.start()
    for number in range(NUM_BLOCKS + 1):
        save(tier, number)
        flush(tier)
    tier.refresh()
    ids = [assert_lent(tier, number) for number in range(1, NUM_BLOCKS + 1)]
    assert tier.contains(0, key_of(0))
    assert tier.borrow(0, key_of(0)) is None
    assert not tier.contains(0, key_of(0))
    tier.give_back(0, ids.pop())
    tier.refresh()
    assert_lent(tier, 0)


def test_a_block_on_disk_is_copied_to_the_region_if_the_engine_has_it(machine: Machine) -> None:
    save(machine.start(), 1)
    tier = machine.restart()
    save(tier, 1)
    assert flush(tier).num_read == 0
    assert_lent(tier, 1)


def test_a_damaged_block_is_not_lent_and_reported_once(machine: Machine) -> None:
    save(machine.start(), 1, 2, 3)
    machine.end()
    flip(machine.file, data_offset(0))
    flip(machine.file, data_offset(1) + BLOCK_BYTES - 1)
    tier = machine.start()
    for number in (1, 2):
        assert tier.contains(0, key_of(number))
        assert tier.borrow(0, key_of(number)) is None
        assert not tier.contains(0, key_of(number))
    assert_lent(tier, 3)
    disk = flush(tier)
    assert disk.num_damaged == 2
    (problem,) = disk.take_problems()
    assert str(machine.file) in problem
    save(tier, 1)
    machine.restart()
    assert_lent(machine.tiers[0], 1)
    assert machine.file.stat().st_size == data_offset(3), "its slot was used again"


@pytest.mark.parametrize("content", [b"foreign", b"shmllmkv" + b"\7" + bytes(99)])
def test_a_file_that_cannot_be_used_is_set_aside(machine: Machine, content: bytes) -> None:
    machine.file.write_bytes(content)
    machine.file.chmod(0o600)
    save(machine.start(), 1)
    tier = machine.restart()
    assert_lent(tier, 1)
    (problem,) = machine.problems
    assert "is renamed to kv-0123456789abcdef.blocks.damaged" in problem
    assert machine.file.with_name(machine.file.name + ".damaged").read_bytes() == content


def test_a_directory_under_the_files_name_is_an_error(machine: Machine) -> None:
    machine.file.mkdir()
    region = machine.region()
    with pytest.raises(OSError, match="directory"):
        Disk(machine.directory, region, PLENTY)
    region.close()


def test_a_removed_file_is_made_again(machine: Machine) -> None:
    tier = machine.start()
    save(tier, 1)
    flush(tier)
    machine.file.unlink()
    save(tier, 2)
    flush(tier)
    tier = machine.restart()
    assert_lent(tier, 2)
    assert machine.problems == []


def test_the_files_of_a_directory_stay_below_the_limit(machine: Machine) -> None:
    limit = 8 * (BLOCK_BYTES + PAGE_BYTES)
    old = file_path(machine.directory, OTHER, 0)
    old.write_bytes(bytes(limit // 2))
    tier = machine.start(limit)
    for number in range(20):
        save(tier, number)
        flush(tier)
        assert sum(each.stat().st_size for each in machine.directory.iterdir()) <= limit
    assert not old.exists()
    tier = machine.restart(limit)
    assert tier.contains(0, key_of(19))
    assert not tier.contains(0, key_of(1))
    machine.restart(limit // 2)
    assert machine.file.stat().st_size <= limit // 2


def test_blocks_that_are_used_stay_on_disk(machine: Machine) -> None:
    limit = 4 * (BLOCK_BYTES + PAGE_BYTES)
    tier = machine.start(limit)
    for number in range(20):
        save(tier, number)
        flush(tier)
        tier.give_back(0, assert_lent(tier, 0))
        flush(tier)
    assert_lent(machine.restart(limit), 0)


def test_only_what_grows_a_file_removes_others(machine: Machine) -> None:
    tier = machine.start()
    for number in range(8):
        save(tier, number)
        flush(tier)
    old = file_path(machine.directory, OTHER, 0)
    old.write_bytes(bytes(2 * BLOCK_BYTES))
    tier = machine.restart(machine.file.stat().st_size + old.stat().st_size)
    sequence = tier._disk._files[0].records[key_of(0)].sequence
    tier.give_back(0, assert_lent(tier, 0))
    flush(tier)
    assert tier._disk._files[0].records[key_of(0)].sequence > sequence
    assert old.exists()
    save(tier, 8)
    flush(tier)
    assert not old.exists()
    assert tier.contains(0, key_of(8))


def test_files_of_running_engines_that_fill_the_directory_are_reported(machine: Machine) -> None:
    old = file_path(machine.directory, OTHER, 0)
    old.write_bytes(bytes(2**20))
    fd = os.open(old, os.O_RDWR)
    assert set_lock(fd, USER_BYTE, fcntl.F_RDLCK)
    tier = machine.start(2**20)
    save(tier, 1, 2)
    flush(tier)
    save(tier, 3)
    flush(tier)
    machine.end()
    (problem,) = machine.problems
    assert "fill" in problem
    os.close(fd)


def test_a_limit_below_a_block_is_reported(machine: Machine) -> None:
    save(machine.start(PAGE_BYTES), 1)
    machine.end()
    assert machine.file.stat().st_size == HEADER_BYTES
    (problem,) = machine.problems
    assert "no room for a block" in problem


def test_a_full_disk_ends_the_writing_only(machine: Machine) -> None:
    tier = machine.start()
    save(tier, 1)
    flush(tier)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (machine.file.stat().st_size + PAGE_BYTES, hard))
    try:
        for number in (2, 3):
            # Regions have their size already, and a limit is for files, not for file systems.
            tier._disk.save(0, key_of(number))
            (block,) = tier.reserve([(0, key_of(number))])
            assert block is not None
            tier.publish(0, block)
        flush(tier)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (problem,) = flush(tier).take_problems()
    assert "not written any more" in problem
    assert "File too large" in problem
    tier.clear()
    tier = machine.restart()
    assert not tier.contains(0, key_of(2))


def test_engines_write_one_file_together(machine: Machine) -> None:
    first, second = machine.start(), machine.start()
    save(first, 1)
    save(second, 2)
    save(first, 3)
    tier = machine.restart()
    for number in (1, 2, 3):
        assert_lent(tier, number)
    assert machine.problems == []


def test_an_engine_finds_what_another_has_written_since(machine: Machine) -> None:
    first, second = machine.start(), machine.start()
    save(first, 1)
    flush(first)
    first.clear()
    save(first, 2)
    flush(first)

    def is_found() -> bool:
        second.refresh()
        return second._disk.contains(0, key_of(2))

    wait_until(is_found, "a look at the file")
    assert not second._disk.contains(0, key_of(1))


def test_a_writer_that_stands_still_delays_nobody_but_writers(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = machine.start()
    save(tier, 1)
    flush(tier)
    fd = os.open(machine.file, os.O_RDWR)
    assert set_lock(fd, WRITER_BYTE, fcntl.F_WRLCK)
    save(tier, 2)
    tier._disk.finish(0.05)
    wait_until(lambda: not machine.disks[0]._thread.is_alive(), "the end of the thread")
    os.close(fd)
    assert_lent(machine.restart(), 1)


def test_blocks_that_a_killed_engine_had_not_written_are_written_by_the_next(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(disk_module.Disk, "save", lambda *_: None)
        tier = machine.start()
        save(tier, 1)
        flush(tier)
    region = tier._own
    disk = Disk(machine.directory, region, PLENTY)
    disk.finish(10)
    disk.join()
    assert disk.num_written == 1
    assert_lent(machine.restart(), 1)


def test_a_block_that_was_reused_before_it_was_written_is_dropped(machine: Machine) -> None:
    tier = machine.start()
    tier._disk.save(0, key_of(77))
    save(tier, 1)
    assert flush(tier).num_written == 1


def test_forgetting_forgets_the_disk_too(machine: Machine) -> None:
    tier = machine.start()
    save(tier, 1, 2)
    flush(tier)
    tier.clear()
    assert not tier.contains(0, key_of(1))
    save(tier, 3)
    tier = machine.restart()
    assert not tier.contains(0, key_of(1))
    assert_lent(tier, 3)


def test_states_have_a_file_of_their_own(tmp_path: Path) -> None:
    layout = RegionLayout((Section(8, 2, PAGE_BYTES), Section(2, 1, 3 * PAGE_BYTES)))
    folder = tmp_path / f"kv+{KEY}"
    folder.mkdir(0o700)
    limit = 2**18
    blocks = [data_of(section, layout.sections[section].block_bytes) for section in range(2)]
    for place in range(2):
        region = create(folder, layout, [place])
        disk = Disk(tmp_path, region, limit)
        assert (place == 1) == disk.contains(0, key_of(0)) == disk.contains(1, key_of(0))
        for section, data in enumerate(blocks):
            write_block(region.fd, layout, section, 1, memoryview(data))
            assert region.publish(section, 1, key_of(0))
            if place:
                assert disk.read(section, key_of(0)) == data
            disk.save(section, key_of(0))
        disk.finish(10)
        disk.join()
        assert disk.num_written == (0 if place else 2)
        region.close()
    names = {each.name for each in tmp_path.glob("kv-*")}
    assert names == {f"kv-{KEY}.blocks", f"kv-{KEY}.states"}
