"""Recorders: the records that they write, their maximum size, and their end."""

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
from shmllm.tracing.recorder import CHECK_PERIOD_NS, Recorder

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


def test_recorded_values_are_read_back(recorder: Recorder, owned: OwnedDirectory) -> None:
    recorder.add(Type.SLICE, Slice.DRAIN, 5, 7, 1, 2, 3, 4, 2**64 - 1)
    recorder.add(Type.SENT, 9, 8, 8)
    (recording,) = read_all(owned.path)
    assert (recording.pid, recording.facts) == (os.getpid(), {"role": "test"})
    thread = threading.get_native_id()
    assert recording.records == [
        (Type.SLICE, Slice.DRAIN, thread, 5, 7, 1, 2, 3, 4, 2**64 - 1),
        (Type.SENT, 9, thread, 8, 8, 0, 0, 0, 0, 0),
    ]


def test_the_records_of_all_threads_are_kept(recorder: Recorder) -> None:
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


def test_records_that_find_no_room_are_counted(recorder: Recorder) -> None:
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


def test_a_recording_ends_when_its_time_is_over(tmp_path: Path) -> None:
    owned = OwnedDirectory(Settings(until_ns=1000), tmp_path)
    recorder = Recorder(SharedDirectory(owned.path), {})
    ended: list[bool] = []
    recorder.at_end(lambda: ended.append(recorder.is_over))
    recorder.add(Type.SLICE, Slice.DRAIN, 1, 999)
    assert not recorder.is_over
    recorder.add(Type.SLICE, Slice.DRAIN, 1, 1000)
    recorder.add(Type.SLICE, Slice.DRAIN, 1, CHECK_PERIOD_NS + 1001)
    assert ended == [True]
    recording = read(recorder.path)
    assert recording is not None
    assert len(recording.records) == 1
    owned.close()


def test_a_recording_ends_with_the_owner_s_lock_and_removes_its_file(tmp_path: Path) -> None:
    owned = OwnedDirectory(Settings(), tmp_path)
    recorder = Recorder(SharedDirectory(owned.path), {})
    other = Recorder(SharedDirectory(owned.path), {})
    recorder.end_if_over(1)
    assert not recorder.is_over
    os.close(owned._fd)  # as the kernel does when the owner is killed
    owned._fd = -1
    recorder.end_if_over(2)
    assert recorder.is_over
    assert not recorder.path.exists()
    assert owned.path.exists()
    other.add(Type.SLICE, Slice.DRAIN, 1, 2)
    assert other.is_over
    assert list(tmp_path.iterdir()) == []


def test_a_recorder_ends_after_its_directory_was_removed(
    owned: OwnedDirectory, recorder: Recorder
) -> None:
    recorder.add(Type.SLICE, Slice.DRAIN, 1, 2)
    owned.close()
    assert not owned.path.exists()
    recorder.add(Type.SLICE, Slice.DRAIN, 1, 3)  # works although the file was deleted
    recorder.end_if_over(4)
    assert recorder.is_over


def test_directories_of_killed_owners_are_removed(tmp_path: Path) -> None:
    left, young, kept = (OwnedDirectory(Settings(), tmp_path) for _ in range(3))
    for directory in (left, young):
        os.close(directory._fd)
        directory._fd = -1
    stranger = tmp_path / "shmllm"
    stranger.mkdir()
    long_ago = time.time() - 2 * directories.MIN_AGE_S
    for path in (left.path, kept.path, stranger):
        os.utime(path, (long_ago, long_ago))
    directories.sweep(tmp_path)
    assert set(tmp_path.iterdir()) == {young.path, kept.path, stranger}
    kept.close()


def test_a_recording_of_a_killed_process_is_read(recorder: Recorder) -> None:
    for i in range(10):
        recorder.add(Type.SLICE, Slice.DRAIN, 1, 2, i)
    next(recorder._claims)  # a record that was claimed but not written before the kill
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

    def test_without_the_variable_no_recorder_exists(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(VARIABLE, raising=False)
        assert process.recorder_of_environment("x") is None

    def test_a_missing_directory_is_a_warning(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))
        assert process.recorder_of_environment("x") is None
        assert "missing in the trace" in caplog.text

    def test_a_forked_child_has_no_recorder(self, owned: OwnedDirectory) -> None:
        one = process.recorder_in(owned.path, "parent")
        pid = os.fork()
        if not pid:
            os._exit(len(process._recorders))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert process.recorder_in(owned.path, "parent") is one
        one.end()
