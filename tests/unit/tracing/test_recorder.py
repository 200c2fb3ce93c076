"""Recorders: what they write, their bound, and when they stop."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmllm.tracing import directory as directories
from shmllm.tracing import process
from shmllm.tracing.directory import VARIABLE, OwnedDirectory, Settings, SharedDirectory
from shmllm.tracing.layout import RECORDS_PER_CHUNK, Slice, Type
from shmllm.tracing.reading import read, read_all
from shmllm.tracing.recorder import LOOK_NS, Recorder

MIB = 1024 * 1024


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[OwnedDirectory]:
    directory = OwnedDirectory(Settings(most_bytes=2 * MIB), tmp_path)
    yield directory
    directory.close()


@pytest.fixture
def recorder(owned: OwnedDirectory) -> Iterator[Recorder]:
    recorder = Recorder(SharedDirectory(owned.path), {"role": "test"})
    yield recorder
    recorder.end()


def test_what_was_recorded_is_read(recorder: Recorder, owned: OwnedDirectory) -> None:
    recorder.add(Type.SLICE, Slice.DRAIN, 5, 7, 1, 2, 3, 4, 2**64 - 1)
    recorder.add(Type.SENT, 9, 8, 8)
    (recording,) = read_all(owned.path)
    assert (recording.pid, recording.facts) == (os.getpid(), {"role": "test"})
    thread = threading.get_native_id()
    assert recording.records == [
        (Type.SLICE, Slice.DRAIN, thread, 5, 7, 1, 2, 3, 4, 2**64 - 1),
        (Type.SENT, 9, thread, 8, 8, 0, 0, 0, 0, 0),
    ]


def test_all_threads_records_are_there(recorder: Recorder) -> None:
    def add(number: int) -> None:
        for i in range(5000):
            recorder.add(Type.SLICE, Slice.DRAIN, 1, 2, number, i)

    threads = [threading.Thread(target=add, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recording = read(recorder.path)
    assert recording is not None
    found = {(record.a, record.b) for record in recording.records}
    assert len(found) == len(recording.records) == 20_000
    assert recording.num_dropped == 0


def test_what_finds_no_room_is_counted(recorder: Recorder) -> None:
    for i in range(2 * RECORDS_PER_CHUNK + 77):
        recorder.add(Type.SLICE, Slice.DRAIN, 1, 2, i)
    recording = read(recorder.path)
    assert recording is not None
    assert [r.a for r in recording.records] == list(range(2 * RECORDS_PER_CHUNK))
    assert recording.num_dropped == 77


def test_a_full_disk_is_no_error(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(28, "No space left on device")

    recorder.add(Type.SLICE, Slice.DRAIN, 1, 2)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    for _ in range(RECORDS_PER_CHUNK):
        recorder.add(Type.SLICE, Slice.DRAIN, 1, 2)
    recording = read(recorder.path)
    assert recording is not None
    assert (len(recording.records), recording.num_dropped) == (RECORDS_PER_CHUNK, 1)


def test_it_ends_when_its_time_is_over(tmp_path: Path) -> None:
    owned = OwnedDirectory(Settings(until_ns=1000), tmp_path)
    recorder = Recorder(SharedDirectory(owned.path), {})
    ended: list[bool] = []
    recorder.at_end(lambda: ended.append(recorder.is_over))
    recorder.add(Type.SLICE, Slice.DRAIN, 1, 999)
    assert not recorder.is_over
    recorder.add(Type.SLICE, Slice.DRAIN, 1, 1000)
    recorder.add(Type.SLICE, Slice.DRAIN, 1, LOOK_NS + 1001)
    assert ended == [True]
    recording = read(recorder.path)
    assert recording is not None
    assert len(recording.records) == 1
    owned.close()


def test_it_ends_without_its_owner_and_takes_its_file_away(tmp_path: Path) -> None:
    owned = OwnedDirectory(Settings(), tmp_path)
    recorder = Recorder(SharedDirectory(owned.path), {})
    other = Recorder(SharedDirectory(owned.path), {})
    recorder.look(1)
    assert not recorder.is_over
    os.close(owned._fd)  # as the kernel does when it is killed
    owned._fd = -1
    recorder.look(2)
    assert recorder.is_over
    assert not recorder.path.exists()
    assert owned.path.exists()
    other.add(Type.SLICE, Slice.DRAIN, 1, 2)
    assert other.is_over
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_is_over_leaves_nothing(owned: OwnedDirectory, recorder: Recorder) -> None:
    recorder.add(Type.SLICE, Slice.DRAIN, 1, 2)
    owned.close()
    assert not owned.path.exists()
    recorder.add(Type.SLICE, Slice.DRAIN, 1, 3)  # its file is gone, which harms nobody
    recorder.look(4)
    assert recorder.is_over


def test_leftovers_of_killed_owners_are_swept(tmp_path: Path) -> None:
    left, young, kept = (OwnedDirectory(Settings(), tmp_path) for _ in range(3))
    for directory in (left, young):
        os.close(directory._fd)
        directory._fd = -1
    stranger = tmp_path / "shmllm"
    stranger.mkdir()
    long_ago = time.time() - 2 * directories.YOUNG_S
    for path in (left.path, kept.path, stranger):
        os.utime(path, (long_ago, long_ago))
    directories.sweep(tmp_path)
    assert set(tmp_path.iterdir()) == {young.path, kept.path, stranger}
    kept.close()


def test_a_recording_cut_short_by_a_death_is_read(recorder: Recorder) -> None:
    for i in range(10):
        recorder.add(Type.SLICE, Slice.DRAIN, 1, 2, i)
    next(recorder._claims)  # claimed, and killed before it was written
    recorder.add(Type.SLICE, Slice.DRAIN, 1, 2, 11)
    recording = read(recorder.path)
    assert recording is not None
    assert [r.a for r in recording.records] == [*range(10), 11]
    recorder.path.write_bytes(recorder.path.read_bytes()[:100])
    assert read(recorder.path) is None


class TestProcess:
    def test_there_is_one_recorder_for_a_trace(self, owned: OwnedDirectory) -> None:
        one = process.recorder_in(owned.path, "first")
        assert process.recorder_in(owned.path, "second") is one
        one.end()
        again = process.recorder_in(owned.path, "third")
        assert again is not one
        again.end()

    def test_no_variable_no_recorder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(VARIABLE, raising=False)
        assert process.recorder_of_environment("x") is None

    def test_a_directory_that_is_gone_is_a_warning(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))
        assert process.recorder_of_environment("x") is None
        assert "missing in the trace" in caplog.text

    def test_a_forked_child_has_none(self, owned: OwnedDirectory) -> None:
        one = process.recorder_in(owned.path, "parent")
        pid = os.fork()
        if not pid:
            os._exit(len(process._recorders))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert process.recorder_in(owned.path, "parent") is one
        one.end()
