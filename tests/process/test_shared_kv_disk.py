"""Engines that find the KV blocks of their prefixes on disk, after shared memory is lost."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.programs import start_source, watched
from support.waiting import PATIENCE_S, wait_until

from shmllm import LLM, EngineStartError, SamplingParams
from shmllm.shared_kv.disk_file import DiskFile
from shmllm.shared_kv.folder import folders, key_of

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
BLOCK_SIZE = 16
Result = tuple[list[int], list[float], int]


class Home:
    """A directory for the copies, and engines whose regions no other test has: their weights are
    random."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "kv"
        seed = random.SystemRandom().randrange(2**31)
        self._options: dict[str, Any] = {
            "load_format": "dummy",
            "seed": seed,
            "kv_cache_memory_bytes": 2**26,
            "num_threads": 1,
            "dtype": "float32",
            "block_size": BLOCK_SIZE,
        }

    def alone(self) -> LLM:
        return LLM("tiny", multiprocess=False, **self._options)

    def start(self, **options: Any) -> LLM:
        shared = {"shared_kv_cache_bytes": 2**23, "shared_kv_cache_path": self.directory}
        return LLM("tiny", **({"multiprocess": False} | self._options | shared | options))

    @property
    def file(self) -> Path:
        (found,) = self.directory.glob("kv-*.blocks")
        return found

    def lose_memory(self) -> None:
        """As a reboot does."""
        keys = {path.name[3:19] for path in self.directory.glob("kv-*.blocks")}
        for folder in folders():
            if key_of(folder) in keys:
                shutil.rmtree(folder)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path)
    yield home
    home.lose_memory()


def prompt(number: int, num_blocks: int = 6) -> list[int]:
    chosen = random.Random(number)
    return [chosen.randrange(10, 1000) for _ in range(num_blocks * BLOCK_SIZE + 1)]


def results(llm: LLM, *numbers: int) -> list[Result]:
    found = []
    for number in numbers:  # one after the other: a batch would not find its own prefixes
        (output,) = llm.generate({"prompt_token_ids": prompt(number)}, GREEDY, use_tqdm=False)
        completion = output.outputs[0]
        assert completion.logprobs is not None
        logprobs = [each.logprob for row in completion.logprobs for each in row.values()]
        assert output.num_cached_tokens is not None
        found.append((completion.token_ids, logprobs, output.num_cached_tokens))
    return found


def without_hits(found: list[Result]) -> list[Result]:
    return [(tokens, logprobs, 0) for tokens, logprobs, _ in found]


def hits(found: list[Result]) -> list[int]:
    return [cached // BLOCK_SIZE for _, _, cached in found]


@pytest.mark.parametrize("reads", ["in_place", "copy"])
def test_prefixes_outlive_shared_memory_with_the_same_bits(home: Home, reads: str) -> None:
    with home.alone() as llm:
        expected = results(llm, 1, 2)
    with home.start(shared_kv_cache_reads=reads) as llm:
        assert results(llm, 1, 2) == expected
    home.lose_memory()
    with home.start(shared_kv_cache_reads=reads) as llm:
        found = results(llm, 1, 2)
    assert hits(found) == [6, 6]
    assert without_hits(found) == expected


@pytest.mark.parametrize("damage", ["bytes", "end", "header"])
def test_damage_costs_hits_and_changes_no_bit(
    home: Home, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with home.start() as llm:
        expected = results(llm, 1, 2)
    home.lose_memory()
    content = bytearray(home.file.read_bytes())
    if damage == "bytes":
        for at in range(8192, len(content), 4096):
            content[at] ^= 64
    elif damage == "end":
        del content[len(content) // 2 :]
    else:
        content[:8] = b"not ours"
    home.file.write_bytes(content)
    with home.start() as llm, caplog.at_level(logging.WARNING):
        found = results(llm, 1, 2)
        assert without_hits(found) == expected
        assert sum(hits(found)) < 12
    warnings = [each.getMessage() for each in caplog.records if "kv-" in each.getMessage()]
    assert len(warnings) == (0 if damage == "end" else 1)
    home.lose_memory()
    with home.start() as llm:
        found = results(llm, 1, 2)
    assert hits(found) == [6, 6], "it was written again"
    assert without_hits(found) == expected


def test_two_engines_write_one_directory(home: Home) -> None:
    with home.start() as first, home.start() as second:
        expected = [*results(first, 1), *results(second, 2), *results(first, 3)]
    home.lose_memory()
    with home.start() as llm:
        found = results(llm, 1, 2, 3)
    assert hits(found) == [6, 6, 6]
    assert without_hits(found) == without_hits(expected)


def test_a_killed_engine_leaves_copies_that_the_next_one_reads(home: Home) -> None:
    numbers = range(6)
    with home.start(multiprocess=True) as llm:
        expected = results(llm, *numbers)
        pid = llm.engine_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    home.lose_memory()
    with home.start() as llm:
        assert without_hits(results(llm, *numbers)) == expected


WRITE = """
import sys
from pathlib import Path
from shmllm.shared_kv.disk_file import DiskFile
file = DiskFile(Path(sys.argv[1]), "0" * 16, 0, 2**20)
print("ready", flush=True)
number = 0
while True:
    while not file.try_lock():
        pass
    for _ in range(3):
        number += 1
        key = bytes([number % 251]) * 32
        if key not in file.records:
            file.write(key, memoryview(bytes([number % 251]) * 2**20), file.num_slots < 8)
    file.unlock()
"""


def test_processes_that_are_killed_while_they_write_leave_no_torn_block(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    chosen = random.Random(5)
    buffer = memoryview(bytearray(2**20))
    num_read = 0
    for _ in range(2):
        with ExitStack() as stack:
            writers = [_start_writer(stack, path) for _ in range(2)]
            file = DiskFile(path, "0" * 16, 0, 2**20)
            for writer in writers:
                end = time.monotonic() + 0.05 + chosen.random() / 20
                while time.monotonic() < end:
                    file.scan()
                    num_read += _check(file, buffer)
                writer.kill()
                writer.wait(PATIENCE_S)
            file.scan()
            assert _check(file, buffer) >= 6
            assert file.num_slots == 8
            file.close()
    assert num_read


def _start_writer(stack: ExitStack, path: Path) -> Any:
    """Start a process that writes, and wait until it has the file: two cannot begin it at once. It
    ends with the stack."""
    writer = start_source(WRITE, str(path))
    stack.callback(writer.communicate)
    stack.callback(writer.kill)
    assert writer.stdout is not None
    with watched(writer):
        assert writer.stdout.readline() == b"ready\n"
    return writer


def _check(file: DiskFile, buffer: memoryview) -> int:
    """Read all records. Returns how many were there still."""
    count = 0
    for key in [*file.records]:
        found = file.read(key, buffer)
        assert found is not None, "damaged"
        if found:
            count += 1
            assert buffer == key[:1] * 2**20
    return count


def test_sleep_writes_before_it_gives_the_memory_back(home: Home) -> None:
    with home.start(enable_sleep_mode=True) as llm:
        expected = results(llm, 1)
        llm.sleep(1)
        llm.wake_up()

        def is_found() -> bool:
            found = results(llm, 1)
            assert without_hits(found) == expected
            return hits(found) == [6]

        wait_until(is_found, "the engine joins again")


def test_a_directory_that_cannot_be_used_is_an_error_of_the_start(
    home: Home, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineStartError, match=r"shared_kv_cache_path .* is not a directory"):
        home.start(shared_kv_cache_path=tmp_path / "file")
