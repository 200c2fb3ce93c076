"""The cache of compiled kernels: it is used, and kernels run also if it is damaged or missing."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.programs import environment, result_of, run_source

from shmllm_kernels.cpu import object_code
from shmllm_kernels.cpu.language import Compiled, compiled
from shmllm_kernels.cpu.memory import put_word

GATHER = """
import json, sys
import numpy as np
from shmllm_kernels.cpu import KernelProgram
from shmllm_kernels.cpu.rows import GATHER
source, rows, indices = np.arange(12, dtype=np.float32), np.array([3]), np.array([2, 0, 2])
out = np.zeros((3, 4), np.float32)
program = KernelProgram(1)
addresses = [array.ctypes.data for array in (rows, indices, source, out)]
program.record(GATHER, [*addresses, 4])
program.replay()
assert (out == source.reshape(3, 4)[indices]).all()
print(json.dumps("shmllm_kernels.cpu.translate" in sys.modules))
"""


@compiled
def _write(out, number):
    put_word(out, 0, number)


def runs(function: Compiled, number: int) -> bool:
    out = np.zeros(1, np.int64)
    (address,) = object_code.addresses_of((function, (number,)))
    ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address)(out.ctypes.data)
    return int(out[0]) == number


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    object_code._warn_once.cache_clear()
    return tmp_path


def cached_files(home: Path) -> list[Path]:
    return sorted((home / "shmllm" / "kernels").glob("*"))


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    assert result_of(run_source(GATHER, env=env)) is True
    files = {path: path.stat().st_mtime_ns for path in cached_files(tmp_path)}
    assert len(files) == 2  # the kernel, and the function that runs a program
    assert result_of(run_source(GATHER, env=env)) is False
    assert {path: path.stat().st_mtime_ns for path in cached_files(tmp_path)} == files


def test_several_processes_can_fill_the_cache_at_once(tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", GATHER]
    programs = [
        subprocess.Popen(command, env=environment(env), stdout=subprocess.DEVNULL) for _ in range(4)
    ]
    assert [program.wait(60) for program in programs] == [0] * 4
    assert len(cached_files(tmp_path)) == 2
    assert result_of(run_source(GATHER, env=env)) is False


DAMAGES = {
    "empty": lambda content: b"",
    "cut off": lambda content: content[: len(content) // 2],
    "changed": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "other": lambda content: b"something else" * 10,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_compiled_again(home: Path, damage) -> None:
    assert runs(_write, 5)
    (path,) = cached_files(home)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert runs(_write, 5)
    assert cached_files(home) == [path]
    assert path.read_bytes() == whole


def test_code_for_another_key_is_compiled_again(home: Path) -> None:
    """Another user may rename files if the cache is in a directory of theirs."""
    assert runs(_write, 5)
    assert runs(_write, 6)
    one, other = cached_files(home)
    one.rename(home / "one")
    other.rename(one)
    (home / "one").rename(other)
    assert runs(_write, 5)
    assert runs(_write, 6)


def test_code_that_others_may_write_is_compiled_again(home: Path) -> None:
    assert runs(_write, 5)
    (path,) = cached_files(home)
    path.chmod(0o620)
    assert runs(_write, 5)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_pipe_in_the_cache_blocks_nobody(home: Path) -> None:
    assert runs(_write, 5)
    (path,) = cached_files(home)
    path.unlink()
    os.mkfifo(path)
    assert runs(_write, 5)
    assert path.is_file()


def test_code_that_another_user_owns_is_not_run(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runs(_write, 5)
    compiled_now = []
    compile_ = object_code._compile
    monkeypatch.setattr(
        object_code, "_compile", lambda *args: compiled_now.append(1) or compile_(*args)
    )
    assert runs(_write, 5)
    assert not compiled_now
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    if cached_files(home)[0].stat().st_uid:  # every user may run code that root owns
        assert runs(_write, 5)
        assert compiled_now


def test_without_a_cache_directory_kernels_compile_and_one_warning_says_so(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "file"))
    assert runs(_write, 6)
    assert runs(_write, 7)
    (record,) = caplog.records
    assert "cannot cache compiled kernels in" in record.message
    assert "file/shmllm/kernels" in record.message


@pytest.mark.parametrize("at", ["mkdir", "mkstemp", "write", "replace"])
def test_kernels_run_if_the_cache_cannot_be_written(
    home: Path, at: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    owner = {
        "mkdir": object_code.Path,
        "mkstemp": object_code.tempfile,
        "replace": os,
        "write": object_code,
    }
    name = "open" if at == "write" else at
    with monkeypatch.context() as patch:
        patch.setattr(owner[at], name, refuse, raising=False)
        assert runs(_write, 8)
    assert "No space left" in caplog.text
    assert cached_files(home) == []


def test_without_a_home_directory_nothing_is_cached(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(home)
    assert runs(_write, 9)
    assert "no home directory" in caplog.text
    assert list(home.iterdir()) == []


def test_the_cache_key_depends_on_the_cpu_and_the_constants(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = [(_write, (1,))]
    key = object_code._key(entry)
    assert key == object_code._key(entry)
    assert key != object_code._key([(_write, (2,))])
    monkeypatch.setattr(object_code.binding, "get_host_cpu_name", lambda: "another")
    object_code._environment.cache_clear()
    try:
        assert object_code._key(entry) != key
    finally:
        monkeypatch.undo()
        object_code._environment.cache_clear()
    assert object_code._key(entry) == key
