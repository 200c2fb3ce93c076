"""The record file holds whole lines, and refuses existing content and a second writer."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from shmllm.batch import output
from shmllm.batch.output import Mode, RecordFile
from shmllm.errors import RequestError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.jsonl"


@pytest.fixture
def opened():
    """A function that opens record files, which are closed at the end of the test."""
    files = []

    def open_file(path, mode=Mode.NEW):
        files.append(RecordFile(str(path), mode))
        return files[-1]

    yield open_file
    for file in files:
        file.close()


def test_a_line_is_in_the_file_as_soon_as_it_is_written(path, opened):
    file = opened(path)
    file.begin(0)
    for line in (b"1\n", b"2\n"):
        file.write(line)
        assert path.read_bytes().endswith(line)
    assert path.read_bytes() == b"1\n2\n"


def test_an_empty_file_is_accepted(path, opened):
    path.touch()
    opened(path).begin(0)


def test_a_file_with_content_is_refused_and_unchanged(path):
    path.write_bytes(b"precious")
    with pytest.raises(
        RequestError, match=r"is not empty; --resume continues .*--overwrite replaces"
    ):
        RecordFile(str(path), Mode.NEW)
    assert path.read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("mode", "size", "left"), [(Mode.OVERWRITE, 0, b""), (Mode.RESUME, 2, b"1\n")]
)
def test_the_file_is_truncated_only_when_the_job_begins(path, opened, mode, size, left):
    path.write_bytes(b"1\ntorn")
    file = opened(path, mode)
    assert path.read_bytes() == b"1\ntorn"
    file.begin(size)
    file.write(b"2\n")
    assert path.read_bytes() == left + b"2\n"


@pytest.mark.parametrize(("is_there", "begins"), [(False, True), (True, False), (False, False)])
def test_a_job_that_does_not_begin_removes_the_file_that_it_created(path, is_there, begins):
    if is_there:
        path.touch()
    file = RecordFile(str(path), Mode.NEW)
    if begins:
        file.begin(0)
    file.close()
    assert path.exists() is (is_there or begins)


def test_a_dangling_link_raises_an_os_error(tmp_path, path):
    path.symlink_to(tmp_path / "no" / "such")
    with pytest.raises(FileNotFoundError):
        RecordFile(str(path), Mode.NEW)


def test_a_second_job_cannot_write_to_the_same_file(path, opened):
    opened(path)
    for mode in Mode:
        with pytest.raises(RequestError, match="another job is writing to"):
            RecordFile(str(path), mode)


def test_the_lock_ends_with_its_process(path, opened):
    source = (
        "import sys, os\nfrom shmllm.batch.output import RecordFile, Mode\n"
        "RecordFile(sys.argv[1], Mode.NEW)\nos.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", source, str(path)], check=False).returncode == -9
    opened(path)


def test_a_missing_directory_raises_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no/such"):
        RecordFile(str(tmp_path / "no/such/out"), Mode.NEW)


@pytest.mark.parametrize("error", [OSError(28, "No space left"), KeyboardInterrupt()])
def test_a_line_that_fails_in_the_middle_is_removed(path, opened, monkeypatch, error):
    file = opened(path)
    file.begin(0)
    file.write(b"first\n")
    write = os.write

    def write_a_little(fd, data):
        if len(data) < 5:
            raise error
        return write(fd, data[:3])

    monkeypatch.setattr(output.os, "write", write_a_little)
    with pytest.raises(type(error)) as caught:
        file.write(b"second\n")
    monkeypatch.undo()
    if isinstance(error, OSError):
        assert caught.value.filename == str(path)
    assert path.read_bytes() == b"first\n"
    file.write(b"third\n")
    assert path.read_bytes() == b"first\nthird\n"


def test_short_writes_are_completed(path, opened, monkeypatch):
    file = opened(path)
    file.begin(0)
    write = os.write
    monkeypatch.setattr(output.os, "write", lambda fd, data: write(fd, data[:1]))
    file.write(b"whole\n")
    assert path.read_bytes() == b"whole\n"


def test_records_can_be_written_to_a_pipe_and_a_device(opened, tmp_path):
    opened("/dev/null").begin(0)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    file = opened(fifo)
    file.begin(0)
    file.write(b"x\n")
    assert os.read(reader, 10) == b"x\n"
    os.close(reader)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_an_error_when_records_reach_the_disk_is_raised(path, opened, monkeypatch, code):
    file = opened(path)
    file.begin(0)
    file.write(b"x\n")

    def fail(fd):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(output.os, "fsync", fail)
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        file.sync()
    assert caught.value.filename == str(path)


def test_a_device_without_a_disk_is_synced(opened):
    file = opened("/dev/null")
    file.begin(0)
    file.sync()
