"""Names of segments: only a locked, initialised segment gets one, only a dead owner loses it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmllm.errors import ProtocolMismatchError, SegmentError
from shmllm.ipc import layout, registry
from shmllm.ipc.layout import NUM_CLIENTS, SegmentKind
from shmllm.ipc.registry import NamedSegment
from shmllm.ipc.segment import Segment
from shmllm.ipc.words import PlainWord

WHAT = "engine 'e'"


@pytest.fixture
def path(control: Segment) -> Iterator[Path]:
    """A free name in the file system of the segments."""
    path = registry.control_path(f"unit-{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def second(nothing_left_behind: None) -> Iterator[Segment]:
    with Segment.create(SegmentKind.CONTROL) as segment:
        segment.take_ownership()
        yield segment


def leave_dead(path: Path, kind: SegmentKind = SegmentKind.CONTROL) -> None:
    """Create a name whose owner is dead: the file exists, but nobody holds its lock."""
    with Segment.create(kind) as segment:
        segment.take_ownership()
        assert registry.publish(segment, path)


def same_file(segment: Segment, path: Path) -> bool:
    return os.path.samestat(os.fstat(segment.fd), os.stat(path))


@pytest.mark.parametrize("name", ["a", "Z-9_", "x" * 64])
def test_a_name_becomes_a_path(name: str) -> None:
    assert registry.control_path(name) == Path(f"/dev/shm/shmllm.{name}")
    assert registry.client_path(name, 7) == Path(f"/dev/shm/shmllm.{name}.7")


@pytest.mark.parametrize("name", ["", "x" * 65, "a.b", "a/b", "..", "a b", "ä", "a\n", "a\0"])
def test_other_names_are_refused(name: str) -> None:
    for make in (registry.control_path, lambda name: registry.client_path(name, 0)):
        with pytest.raises(SegmentError, match="1 to 64 letters"):
            make(name)


def test_names_lists_only_names_of_segments(tmp_path: Path) -> None:
    ours = ["shmllm.b", "shmllm.a.31", "shmllm.a", "shmllm.a.2"]
    strangers = ["shmllm", "shmllm.", "shmllm.a.b", "shmllm.a.1.2", "shmllm.a.", "xshmllm.a", "a"]
    for entry in [*ours, *strangers]:
        (tmp_path / entry).touch()
    found = registry.names(tmp_path)
    assert found == [
        NamedSegment(tmp_path / "shmllm.a", "a", None),
        NamedSegment(tmp_path / "shmllm.a.2", "a", 2),
        NamedSegment(tmp_path / "shmllm.a.31", "a", 31),
        NamedSegment(tmp_path / "shmllm.b", "b", None),
    ]
    assert [entry.kind for entry in found[:2]] == [SegmentKind.CONTROL, SegmentKind.CLIENT]


@pytest.mark.parametrize("place", [None, 0, NUM_CLIENTS - 1])
@pytest.mark.parametrize("name", ["0", "-", "_", "shmllm", "x" * 64])
def test_every_path_is_read_back_as_its_name(name: str, place: int | None, tmp_path: Path) -> None:
    if place is None:
        path = registry.control_path(name, tmp_path)
    else:
        path = registry.client_path(name, place, tmp_path)
    path.touch()
    assert registry.names(tmp_path) == [NamedSegment(path, name, place)]


def test_a_published_segment_can_be_attached_and_is_for_its_user_only(
    control: Segment, path: Path
) -> None:
    control.take_ownership()
    assert registry.publish(control, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with registry.attach(path, SegmentKind.CONTROL, WHAT) as attached:
        assert attached.nonce == control.nonce


def test_a_name_in_use_is_neither_replaced_nor_swept(
    control: Segment, path: Path, second: Segment
) -> None:
    control.take_ownership()
    assert registry.publish(control, path)
    assert not registry.publish(second, path)
    assert not registry.sweep(path)
    assert same_file(control, path)


def test_publish_replaces_the_name_of_a_dead_owner(control: Segment, path: Path) -> None:
    leave_dead(path)
    control.take_ownership()
    assert registry.publish(control, path)
    assert same_file(control, path)


def test_a_sweep_frees_the_name_of_a_dead_owner_and_accepts_an_absent_name(
    control: Segment, path: Path
) -> None:
    leave_dead(path)
    assert registry.sweep(path)
    assert not path.exists()
    assert registry.sweep(path)


def test_a_sweep_leaves_no_lock_behind(control: Segment, path: Path) -> None:
    assert registry.publish(control, path)  # without an owner
    assert registry.sweep(path)
    control.take_ownership()


def test_a_sweep_removes_only_the_file_that_it_locked(
    control: Segment, path: Path, second: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another segment gets the name after the sweeper opened the old file."""
    leave_dead(path)
    really_lock = registry.write_lock

    def change_hands(byte: int) -> bytes:
        monkeypatch.undo()
        assert registry.publish(second, path)
        return really_lock(byte)

    monkeypatch.setattr(registry, "write_lock", change_hands)
    assert registry.sweep(path)
    assert same_file(second, path)


def test_withdraw_removes_only_the_segment_s_own_name(
    control: Segment, path: Path, second: Segment
) -> None:
    registry.withdraw(control, path)
    assert registry.publish(second, path)
    registry.withdraw(control, path)
    assert same_file(second, path)
    registry.withdraw(second, path)
    assert not path.exists()


def test_a_missing_directory_is_a_clear_error(control: Segment, tmp_path: Path) -> None:
    with pytest.raises(SegmentError, match=r"cannot link .*No such file"):
        registry.publish(control, tmp_path / "absent" / "shmllm.x")


def test_a_segment_of_another_file_system_cannot_get_the_name(
    control: Segment, tmp_path: Path
) -> None:
    if os.stat(tmp_path).st_dev == os.stat("/dev/shm").st_dev:
        pytest.skip("temporary files lie in /dev/shm")
    with pytest.raises(SegmentError, match="cannot link"):
        registry.publish(control, tmp_path / "shmllm.x")


def test_clients_take_the_first_free_place_until_all_are_taken(client: Segment, path: Path) -> None:
    name = path.name.removeprefix(registry.PREFIX)
    client.take_ownership()
    places = [registry.client_path(name, place) for place in range(NUM_CLIENTS)]
    try:
        assert [registry.claim_place(client, name) for _ in places] == list(range(NUM_CLIENTS))
        with pytest.raises(SegmentError, match=f"has {NUM_CLIENTS} clients"):
            registry.claim_place(client, name)
        places[5].unlink()
        assert registry.claim_place(client, name) == 5
        places[3].unlink()
        leave_dead(places[3], SegmentKind.CLIENT)
        assert registry.claim_place(client, name) == 3
    finally:
        for place in places:
            place.unlink(missing_ok=True)


def test_attaching_to_an_absent_name(path: Path) -> None:
    with pytest.raises(SegmentError, match=f"engine 'e' is not running: there is no {path}"):
        registry.attach(path, SegmentKind.CONTROL, WHAT)


def test_attaching_to_a_segment_whose_owner_is_dead(control: Segment, path: Path) -> None:
    leave_dead(path)
    with pytest.raises(SegmentError, match=r"engine 'e' is dead.*shmllm ipc gc"):
        registry.attach(path, SegmentKind.CONTROL, WHAT)


def test_attaching_to_another_kind(client: Segment, path: Path) -> None:
    client.take_ownership()
    assert registry.publish(client, path)
    with pytest.raises(ProtocolMismatchError, match="CONTROL segment has"):
        registry.attach(path, SegmentKind.CONTROL, WHAT)


def test_attaching_to_another_version(control: Segment, path: Path) -> None:
    control.take_ownership()
    assert registry.publish(control, path)
    PlainWord(control.buffer, layout.VERSION_OFFSET).store(7)
    with pytest.raises(ProtocolMismatchError, match="speaks version 7"):
        registry.attach(path, SegmentKind.CONTROL, WHAT)


def test_attaching_to_another_user_s_segment(
    control: Segment, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control.take_ownership()
    assert registry.publish(control, path)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(SegmentError, match=f"user {owner}, this process is user {owner + 1}"):
        registry.attach(path, SegmentKind.CONTROL, WHAT)


def test_attaching_to_a_file_that_may_not_be_opened(
    control: Segment, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert registry.publish(control, path)

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert not registry.sweep(path)
        with pytest.raises(SegmentError, match="belongs to user"):
            registry.attach(path, SegmentKind.CONTROL, WHAT)


def test_a_symbolic_link_is_never_followed(
    control: Segment, path: Path, second: Segment, tmp_path: Path
) -> None:
    control.take_ownership()
    real = path.with_name(f"{path.name}-real")
    assert registry.publish(control, real)
    path.symlink_to(real)
    try:
        with pytest.raises(SegmentError):
            registry.attach(path, SegmentKind.CONTROL, WHAT)
        registry.withdraw(second, path)
        assert real.exists()
    finally:
        real.unlink()


def test_a_link_or_a_directory_under_the_name_is_a_name_in_use(
    control: Segment, path: Path, tmp_path: Path
) -> None:
    """Every user may create one in /dev/shm; it must not cause a bare OSError."""
    control.take_ownership()
    path.symlink_to(tmp_path)
    assert not registry.sweep(path)
    assert not registry.publish(control, path)
    path.unlink()
    path.mkdir()
    try:
        assert not registry.sweep(path)
    finally:
        path.rmdir()
