"""Hundreds of kills at random times, and thousands of owners that contend for one name, in one
folder and in two folders of one user.

SHMLLM_RANDOM_KILLS sets how many kills (300), SHMLLM_NAME_ROUNDS how many rounds for a name
(10,000), SHMLLM_TEST_SEED repeats a run. 300 kills take about nine minutes on two cores,
10,000 rounds less than a minute, in one folder as in two.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.programs import is_running, kill, read_line, start_source
from support.waiting import PATIENCE_S, holds_within

from shmllm.ipc import folder

pytestmark = [pytest.mark.stress, pytest.mark.usefixtures("no_leaks")]

NUM_KILLS = int(os.environ.get("SHMLLM_RANDOM_KILLS", "300"))
NUM_ROUNDS = int(os.environ.get("SHMLLM_NAME_ROUNDS", "10000"))
SEED = int(os.environ.get("SHMLLM_TEST_SEED", str(time.time_ns() % 10**9)))
LATEST_KILL_S = 4.0
AT_ONCE = 2
NUM_CLAIMANTS = 3
NUM_SWEEPERS = 2
GONE_WITHIN_S = 10.0

FRONT_END = """
import os, sys
from shmllm import LLM, EngineDeadError, EngineStartError, SamplingParams
from shmllm.client.private import PrivateEngineClient
start = PrivateEngineClient.__init__
def start_and_tell(self, *arguments, **options):
    start(self, *arguments, **options)
    print(self.pid, flush=True)
PrivateEngineClient.__init__ = start_and_tell
try:
    with LLM(kv_cache_memory_bytes=2**26, num_threads=1) as llm:
        while True:
            llm.generate(["x"] * 16, SamplingParams(max_tokens=200), use_tqdm=False)
except (EngineDeadError, EngineStartError) as error:
    assert "SIGKILL" in str(error), error
    sys.exit(7)
"""


def kill_one(victim: str, after_s: float) -> None:
    """Start a front end with its engine and kill one of them some time later."""
    with tempfile.TemporaryFile() as stderr:
        front_end = start_source(FRONT_END, stderr=stderr)
        try:
            engine = int(read_line(front_end))
            time.sleep(after_s)
            os.kill(engine if victim == "engine" else front_end.pid, signal.SIGKILL)
            is_gone = holds_within(
                lambda: front_end.poll() is not None and not is_running(engine), GONE_WITHIN_S
            )
        finally:
            kill(front_end)
        stderr.seek(0)
        complaints = stderr.read().decode()
        where = f"{victim} after {after_s:.3f} s\n{complaints}"
        assert is_gone, where
        assert front_end.returncode == (7 if victim == "engine" else -signal.SIGKILL), where
        assert complaints == "", where


def test_random_kills_leave_nothing() -> None:
    faulthandler.cancel_dump_traceback_later()  # this takes minutes
    print(f"seed {SEED}, {NUM_KILLS} kills")
    rng = random.Random(SEED)
    plan = [
        (rng.choice(["engine", "front end"]), rng.uniform(0, LATEST_KILL_S))
        for _ in range(NUM_KILLS)
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for outcome in [pool.submit(kill_one, *cell) for cell in plan]:
            outcome.result(NUM_KILLS * PATIENCE_S)


# Several processes fight for one name. Whoever gets it also has to get a lock of another
# kind, on a file of the test's own; that fails if there is a second owner.
CONTEST = """
import fcntl, json, os, random, signal, sys, time
from collections import Counter
from pathlib import Path
from shmllm.errors import SegmentError
from shmllm.ipc import folder, registry
from shmllm.ipc.states import SegmentKind
from shmllm.ipc.segment import Segment

role, directory, rounds, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
registry.SHM_DIRECTORY = directory
folders = folder.find(directory)
rng = random.Random(seed)
seen = Counter()

def bears_name(segment, path):
    try:
        return os.path.samestat(os.fstat(segment.fd), os.stat(path))
    except FileNotFoundError:
        return False

def claim(ending):
    judge = os.open(directory / "judge", os.O_RDWR)
    path = rng.choice(folders) / "contested"
    segment = Segment.create(SegmentKind.CONTROL, directory=str(directory))
    segment.take_ownership()
    if not registry.publish(segment, path):
        seen["refused"] += 1
        segment.close()
        os.close(judge)
        return
    seen["owner"] += 1
    try:
        fcntl.flock(judge, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        seen["second owner"] += 1
    for _ in range(rng.randrange(20)):
        if not bears_name(segment, path):
            seen["lost its name"] += 1
            break
        os.sched_yield()
    # The judge's lock ends before the name is free. A dying process would end both in any order.
    os.close(judge)
    if ending == "killed":
        os.write(report, json.dumps(seen).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "withdraws":
        registry.withdraw(segment, path)
    segment.close()

if role == "claimant":
    for turn in range(rounds):
        ending = rng.choices(["withdraws", "vanishes", "killed"], [45, 50, 5])[0]
        if ending != "killed":
            claim(ending)
            continue
        reading, report = os.pipe()
        child = os.fork()
        if child == 0:
            seen.clear()
            claim(ending)
            os.write(report, json.dumps(seen).encode())
            os._exit(0)
        os.close(report)
        seen.update(json.loads(os.read(reading, 4096)))
        os.close(reading)
        seen["killed"] += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
else:
    while not (directory / "over").exists():
        for _ in range(20):
            time.sleep(0.0001)
            path = registry.control_path("contested")
            if role == "sweeper":
                seen["free" if registry.sweep(path) else "live"] += 1
                continue
            try:
                registry.attach(path, SegmentKind.CONTROL, "it").close()
                seen["attached"] += 1
            except SegmentError as error:
                seen["dead" if "is dead" in str(error) else "absent"] += 1
                assert "is dead" in str(error) or "is not running" in str(error), error
print(json.dumps(seen))
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory in shared memory that only this test uses, with one folder of this user."""
    with tempfile.TemporaryDirectory(prefix="test-names-", dir="/dev/shm") as name:
        (Path(name) / "judge").touch()
        folder.make(Path(name))
        yield Path(name)


def contest(directory: Path, preface: str = "", num_rounds: int = NUM_ROUNDS) -> Counter[str]:
    """Run claimants, sweepers and front ends of one name; return the events that they counted."""

    def start(role: str, index: int) -> subprocess.Popen[bytes]:
        rounds = -(-num_rounds // NUM_CLAIMANTS)
        arguments = (role, str(directory), str(rounds), str(SEED + index))
        return start_source(preface + CONTEST, *arguments, stderr=subprocess.PIPE)

    seen: Counter[str] = Counter()
    claimants = [start("claimant", index) for index in range(NUM_CLAIMANTS)]
    sweepers = [start("sweeper", index) for index in range(NUM_SWEEPERS)]
    sweepers.append(start("front end", NUM_SWEEPERS))
    try:
        for process in claimants + sweepers:
            if process is sweepers[0]:
                (directory / "over").touch()
            out, complaints = process.communicate(timeout=10 * PATIENCE_S)
            assert process.returncode == 0, complaints.decode()
            assert complaints == b""
            seen.update(json.loads(out))
    finally:
        for process in claimants + sweepers:
            kill(process)
    return seen


@pytest.mark.parametrize("num_folders", [1, 2])
def test_a_name_never_has_two_owners_and_never_loses_a_living_one(
    directory: Path, num_folders: int
) -> None:
    faulthandler.cancel_dump_traceback_later()  # this may take minutes
    if num_folders == 2:
        first = folder.first_path(directory)
        first.with_name(f"{first.name}.{'f' * 16}").mkdir(0o700)
    print(f"seed {SEED}, {NUM_ROUNDS} rounds")
    seen = contest(directory)
    print(dict(seen))
    assert seen["second owner"] == 0
    assert seen["lost its name"] == 0
    assert seen["owner"] + seen["refused"] >= NUM_ROUNDS
    for event in ("owner", "refused", "killed", "free", "live", "attached", "dead", "absent"):
        assert seen[event] > 0, f"{event} never happened, so this showed nothing"


def test_the_contest_notices_a_publish_that_looks_into_one_folder_only(directory: Path) -> None:
    first = folder.first_path(directory)
    first.with_name(f"{first.name}.{'f' * 16}").mkdir(0o700)
    careless = """
from shmllm.ipc import registry
registry.publish = registry._publish_in_folder
"""
    assert contest(directory, careless, num_rounds=600)["second owner"] > 0


def test_the_contest_notices_a_sweep_that_does_not_take_the_lock(directory: Path) -> None:
    careless = """
from shmllm.ipc import registry
def sweep(path):
    path.unlink(missing_ok=True)
    return True
registry.sweep = sweep
"""
    seen = contest(directory, careless, num_rounds=600)
    assert seen["lost its name"] > 0
    assert seen["second owner"] > 0
