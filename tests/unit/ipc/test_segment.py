from __future__ import annotations

import errno
import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shmllm.errors import NoSpaceError, ProtocolMismatchError, SegmentError
from shmllm.ipc import layout
from shmllm.ipc import segment as module
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import SegmentKind
from shmllm.ipc.words import PlainWord

KINDS = list(SegmentKind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_segment_can_be_attached_and_shows_the_same_bytes(kind: SegmentKind) -> None:
    with Segment.create(kind) as made, Segment.attach(os.dup(made.fd), kind) as attached:
        assert attached.kind is kind
        assert attached.nonce == made.nonce
        made.buffer[layout.PAGE_BYTES + 5] = 99
        assert attached.buffer[layout.PAGE_BYTES + 5] == 99
        assert len(attached.buffer) == layout.TOTAL_BYTES[kind]


def test_a_segment_has_no_name_and_is_for_its_user_only(control: Segment) -> None:
    status = os.fstat(control.fd)
    assert status.st_nlink == 0
    assert status.st_mode & 0o777 == 0o600


def test_slots_take_no_memory_before_they_are_used(client: Segment) -> None:
    allocated = os.fstat(client.fd).st_blocks * 512
    assert allocated == layout.ALLOCATED_BYTES[SegmentKind.CLIENT]
    client.allocate(layout.REQUEST_MEDIUM_SLOTS_OFFSET, layout.MEDIUM_SLOT_BYTES)
    assert os.fstat(client.fd).st_blocks * 512 == allocated + layout.MEDIUM_SLOT_BYTES
    client.discard(layout.REQUEST_MEDIUM_SLOTS_OFFSET, layout.MEDIUM_SLOT_BYTES)
    assert os.fstat(client.fd).st_blocks * 512 == allocated


def test_version_is_stored_last_and_magic_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[int] = []

    class Recorder(PlainWord):
        __slots__ = ("offset",)

        def __init__(self, view: memoryview, offset: int) -> None:
            super().__init__(view, offset)
            self.offset = offset

        def store(self, value: int) -> None:
            stored.append(self.offset)
            super().store(value)

    monkeypatch.setattr(module, "Word", Recorder)
    Segment.create(SegmentKind.CONTROL).close()
    assert stored[-2:] == [layout.MAGIC_OFFSET, layout.VERSION_OFFSET]


def _overwrite(offset: int, value: int) -> Callable[[Segment], None]:
    return lambda segment: PlainWord(segment.buffer, offset).store(value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_overwrite(layout.MAGIC_OFFSET, 0), "no shmllm segment"),
        (
            _overwrite(layout.VERSION_OFFSET, layout.PROTOCOL_VERSION + 1),
            f"speaks version {layout.PROTOCOL_VERSION + 1}, this process version",
        ),
        (_overwrite(layout.VERSION_OFFSET, 0), "speaks version 0"),
        (_overwrite(layout.KIND_OFFSET, 2), r"kind 2, expected 1 \(CONTROL\)"),
        (lambda segment: os.ftruncate(segment.fd, 4096), "this file has 4096.* /dev/shm/"),
    ],
)
def test_a_damaged_header_is_refused(
    control: Segment, damage: Callable[[Segment], None], message: str
) -> None:
    damage(control)
    fd = os.dup(control.fd)
    try:
        with pytest.raises(ProtocolMismatchError, match=message):
            Segment.attach(fd, SegmentKind.CONTROL)
    finally:
        os.close(fd)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_with_a_hole_is_refused_before_it_is_mapped(
    kind: SegmentKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Segment.create(kind) as segment:
        segment.discard(2 * layout.PAGE_BYTES, layout.PAGE_BYTES)
        monkeypatch.delattr(mmap, "mmap")
        with pytest.raises(SegmentError, match=r"/dev/shm/.* has holes: .*at least"):
            Segment.attach(segment.fd, kind)


def test_the_creator_of_a_truncated_segment_can_close_it(control: Segment) -> None:
    os.ftruncate(control.fd, 0)
    control.close()


def test_a_segment_of_the_other_kind_is_refused(control: Segment) -> None:
    with pytest.raises(ProtocolMismatchError):
        Segment.attach(control.fd, SegmentKind.CLIENT)


def test_a_descriptor_that_is_not_open_is_refused() -> None:
    with pytest.raises(SegmentError, match="cannot attach descriptor"):
        Segment.attach(10**6, SegmentKind.CONTROL)


def test_another_users_segment_is_refused(
    control: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(SegmentError, match="this process is user 12345"):
        Segment.attach(control.fd, SegmentKind.CONTROL)


def test_a_missing_directory_is_explained(tmp_path: Path) -> None:
    with pytest.raises(SegmentError, match="tmpfs"):
        Segment.create(SegmentKind.CONTROL, directory=str(tmp_path / "absent"))


def test_a_file_system_without_room_for_a_file_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(NoSpaceError, match=r"bytes free in /dev/shm \(No space.*ipc gc"):
        Segment.create(SegmentKind.CONTROL)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_the_error_for_full_memory_names_needed_and_free_bytes(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoSpaceError) as caught:
        Segment.create(SegmentKind.CONTROL)
    needed, free = re.findall(r"(\d+) bytes (?:needed|free)", str(caught.value))
    assert int(needed) == layout.ALLOCATED_BYTES[SegmentKind.CONTROL]
    assert int(free) > 0
    assert "--shm-size" in str(caught.value)


def test_a_segment_has_one_owner(control: Segment) -> None:
    with Segment.attach(os.dup(control.fd), SegmentKind.CONTROL) as other:
        assert not control.is_owned()
        control.take_ownership()
        control.take_ownership()
        assert control.is_owned()
        assert other.is_owned()
        with pytest.raises(SegmentError, match="owns this CONTROL segment"):
            other.take_ownership()


def test_closing_the_owner_frees_ownership_and_leaves_the_segment(control: Segment) -> None:
    owner = Segment.attach(os.dup(control.fd), SegmentKind.CONTROL)
    owner.take_ownership()
    owner.close()
    assert not control.is_owned()
    control.take_ownership()


def test_close_is_idempotent_and_final() -> None:
    segment = Segment.create(SegmentKind.CONTROL)
    buffer = segment.buffer
    segment.close()
    segment.close()
    assert not segment.is_usable
    for use in (
        lambda: segment.fd,
        lambda: segment.buffer,
        segment.take_ownership,
        segment.is_owned,
        lambda: segment.allocate(0, 1),
    ):
        with pytest.raises(SegmentError, match="CONTROL segment is closed"):
            use()
    with pytest.raises(ValueError, match="released"):
        buffer[0]


def test_an_array_over_the_segment_outlives_close() -> None:
    segment = Segment.create(SegmentKind.CONTROL)
    array = np.frombuffer(segment.buffer, dtype=np.uint8, count=8)
    num_fds = len(os.listdir("/proc/self/fd"))
    segment.close()
    assert array.tobytes() == b"shmllm01"
    del array
    assert len(os.listdir("/proc/self/fd")) == num_fds - 2, "the array's end unmaps the segment"


def test_creation_that_fails_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise SegmentError("no doorbell")

    monkeypatch.setattr(module, "initialise_doorbell", fail)
    with pytest.raises(SegmentError, match="no doorbell"):
        Segment.create(SegmentKind.CLIENT)


def test_the_name_of_a_doorbell_cannot_be_guessed(
    nothing_left_behind: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    really_initialise = module.initialise_doorbell

    def initialise(area: memoryview, name: str) -> None:
        names.append(name)
        really_initialise(area, name)

    monkeypatch.setattr(module, "initialise_doorbell", initialise)
    for _ in range(2):
        with Segment.create(SegmentKind.CONTROL) as control:
            assert f"{control.nonce:x}" not in names[-1]
    assert len(set(names)) == 2
    assert all(re.fullmatch("/shmllm-[0-9a-f]{32}", name) for name in names)
