"""Names of segments: only a locked, initialised segment gets one, only a dead owner loses it."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.other_user import shared_directory

from shmllm.errors import ProtocolMismatchError, SegmentError
from shmllm.ipc import folder, layout, registry
from shmllm.ipc.layout import NUM_CLIENTS
from shmllm.ipc.registry import NamedSegment
from shmllm.ipc.segment import SWEEPER_BYTE, Segment, write_lock
from shmllm.ipc.states import SegmentKind
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
    folder = Path("/dev/shm", f"shmllm-{os.geteuid()}")
    assert registry.control_path(name) == folder / name
    assert registry.client_path(name, 7) == folder / f"{name}.7"


@pytest.mark.parametrize("name", ["", "x" * 65, "a.b", "a/b", "..", "a b", "ä", "a\n", "a\0"])
def test_other_names_are_refused(name: str) -> None:
    for make in (registry.control_path, lambda name: registry.client_path(name, 0)):
        with pytest.raises(SegmentError, match="1 to 64 letters"):
            make(name)


def test_names_lists_only_names_of_segments(tmp_path: Path) -> None:
    ours = ["b", "a.31", "a", "a.2"]
    strangers = ["a.b", "a.1.2", "a.", ".a", "..a", "a b", "a.1 ", "x" * 65]
    for entry in [*ours, *strangers]:
        (tmp_path / entry).touch()
    found = registry.names(tmp_path)
    assert found == [
        NamedSegment(tmp_path / "a", "a", None),
        NamedSegment(tmp_path / "a.2", "a", 2),
        NamedSegment(tmp_path / "a.31", "a", 31),
        NamedSegment(tmp_path / "b", "b", None),
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
        registry.publish(control, tmp_path / "absent" / "x")


def test_a_segment_of_another_file_system_cannot_get_the_name(
    control: Segment, tmp_path: Path
) -> None:
    if os.stat(tmp_path).st_dev == os.stat("/dev/shm").st_dev:
        pytest.skip("temporary files lie in /dev/shm")
    with pytest.raises(SegmentError, match="cannot link"):
        registry.publish(control, tmp_path / "x")


def test_clients_take_the_first_free_place_until_all_are_taken(client: Segment, path: Path) -> None:
    name = path.name
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


def test_attaching_to_an_absent_engine_lists_those_that_run(
    second: Segment, path: Path, tmp_path: Path
) -> None:
    absent, dead = path.with_name(f"{path.name}-absent"), path.with_name(f"{path.name}-dead")
    leave_dead(dead)
    assert registry.publish(second, path)
    try:
        with pytest.raises(SegmentError, match=rf"{absent}; running: .*{path.name}\b") as caught:
            registry.attach(absent, SegmentKind.CONTROL, WHAT)
        assert dead.name not in str(caught.value)
        with pytest.raises(SegmentError, match="no named engine runs; start one with: shmllm"):
            registry.attach(tmp_path / "absent", SegmentKind.CONTROL, WHAT)
        client = path.with_name(f"{absent.name}.1")
        with pytest.raises(SegmentError, match=f"there is no {client}$"):
            registry.attach(client, SegmentKind.CLIENT, "it")
    finally:
        dead.unlink()


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
    other = layout.PROTOCOL_VERSION + 1
    PlainWord(control.buffer, layout.VERSION_OFFSET).store(other)
    with pytest.raises(ProtocolMismatchError, match=f"speaks version {other}"):
        registry.attach(path, SegmentKind.CONTROL, WHAT)


def test_attaching_to_another_user_s_segment(
    control: Segment, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control.take_ownership()
    assert registry.publish(control, path)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(SegmentError, match=f"user {owner} and this process is user {owner + 1}"):
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
        with pytest.raises(SegmentError, match="Permission denied"):
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


def odd_files(directory: Path) -> list[Path]:
    """A pipe, a directory, a link to a file and a link to nothing, each under a valid name."""
    pipe, directory_, link, dangling = (directory / name for name in "pdln")
    os.mkfifo(pipe)
    directory_.mkdir()
    (directory / "target!").touch()
    link.symlink_to("target!")
    dangling.symlink_to("nothing")
    return [pipe, directory_, link, dangling]


def test_what_is_no_file_of_ours_is_a_name_in_use(control: Segment, tmp_path: Path) -> None:
    control.take_ownership()
    for path in odd_files(tmp_path):
        assert not registry.sweep(path)
        assert not registry.publish(control, path)
        with pytest.raises(SegmentError, match=f"{path} is no segment of this user"):
            registry.is_owned(path)
        with pytest.raises(SegmentError, match=f"attach to {WHAT}: {path} is no segment"):
            registry.attach(path, SegmentKind.CONTROL, WHAT)
        registry.withdraw(control, path)
        assert os.path.lexists(path)


def test_a_sweep_does_not_wait_for_another_sweeper_for_ever(
    control: Segment, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_dead(path)
    monkeypatch.setattr(registry, "_LOCK_PAUSE_S", 0)
    with path.open("rb+") as stopped_sweeper:
        fcntl.fcntl(stopped_sweeper, fcntl.F_OFD_SETLK, write_lock(SWEEPER_BYTE))
        assert not registry.sweep(path)
        assert not registry.publish(control, path)
        assert path.exists()
    assert registry.sweep(path)


def test_a_name_in_a_folder_that_disappears_is_free(control: Segment, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "x"
    assert registry.sweep(path)
    assert not registry.is_owned(path)
    registry.withdraw(control, path)
    with pytest.raises(SegmentError, match=f"not running: there is no {path}"):
        registry.attach(path, SegmentKind.CONTROL, WHAT)
    assert registry.names(path.parent) == []


def test_no_name_is_used_in_a_directory_that_others_may_use(
    control: Segment, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    path = tmp_path / "x"
    control.take_ownership()
    assert not registry.sweep(path)
    for use in (
        lambda: registry.publish(control, path),
        lambda: registry.attach(path, SegmentKind.CONTROL, WHAT),
        lambda: registry.names(tmp_path),
    ):
        with pytest.raises(SegmentError, match="other users may use the folder"):
            use()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def two_folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Both folders belong to this user, in a directory that stands for /dev/shm."""
    with shared_directory() as root:
        monkeypatch.setattr(registry, "SHM_DIRECTORY", root)
        first = folder.first_path(root)
        second = first.with_name(f"{first.name}.{'a' * 16}")
        second.mkdir(0o700)
        first.mkdir(0o700)
        yield first, second


def test_an_operation_stays_in_the_folder_that_was_checked(
    control: Segment, two_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another folder comes under the path after the check."""
    really_open = folder.opened
    other, path = two_folders
    moved = path.with_name("moved")

    @contextmanager
    def swap(path: Path) -> Iterator[int]:
        with really_open(path) as descriptor:
            if not moved.exists():
                path.rename(moved)
                other.rename(path)
            yield descriptor
        if moved.exists():
            path.rename(other)
            moved.rename(path)

    monkeypatch.setattr(folder, "opened", swap)
    assert registry._try_link(control, path / "x")
    assert same_file(control, path / "x")
    os.close(registry.open_name(path / "x"))
    registry.withdraw(control, path / "x")
    assert list(path.iterdir()) == list(other.iterdir()) == []


def test_a_name_is_found_in_each_folder(
    control: Segment, two_folders: tuple[Path, Path], client: Segment
) -> None:
    first, second = two_folders
    control.take_ownership()
    client.take_ownership()
    assert registry.control_path("x") == first / "x"
    assert registry.publish(control, second / "x")
    assert registry.control_path("x") == second / "x"
    assert registry.claim_place(client, "x") == 0
    assert registry.client_path("x", 0) == second / "x.0"
    assert [entry.path for entry in registry.names()] == [second / "x", second / "x.0"]


def test_a_live_name_counts_before_a_dead_one(
    control: Segment, two_folders: tuple[Path, Path]
) -> None:
    first, second = two_folders
    control.take_ownership()
    assert registry.publish(control, second / "x")
    with Segment.create(SegmentKind.CONTROL) as dead:
        assert registry.publish(dead, first / "y")
        os.link(first / "y", first / "x")
    assert registry.control_path("x") == second / "x"


@pytest.mark.parametrize("order", [1, -1])
def test_a_name_has_one_owner_in_all_folders(
    control: Segment, two_folders: tuple[Path, Path], second: Segment, order: int
) -> None:
    here, there = two_folders[::order]
    control.take_ownership()
    assert registry.publish(control, here / "x")
    assert not registry.publish(second, there / "x")
    assert not (there / "x").exists()
    assert same_file(control, here / "x")
    registry.withdraw(control, here / "x")
    with Segment.create(SegmentKind.CONTROL) as third:
        assert registry.publish(third, there / "x")


def test_a_dead_name_in_one_folder_keeps_nobody_from_the_other(
    control: Segment, two_folders: tuple[Path, Path]
) -> None:
    first, second = two_folders
    leave_dead(second / "x")
    os.mkfifo(second / "y")
    control.take_ownership()
    assert registry.publish(control, first / "x")
    assert registry.publish(control, first / "y")
