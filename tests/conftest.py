"""What all tests share: nothing of ours may outlive a test, and small real models.

The leak check runs around every test that starts processes: afterwards no process of
shmllm is left that was not there before, and /dev/shm holds of ours what it held.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shmllm import LLM
from shmllm.client.launch import SPIN_COUNT, WAITING_VARIABLES
from shmllm.ipc.layout import CREATOR_PID_OFFSET

# Read when torch is loaded, which no import above does. Compute threads of this process, those
# of transformers and of engines in the caller's process, would otherwise spin for milliseconds
# on the cores that other tests need; engines of their own are started with the same value.
if not os.environ.keys() & set(WAITING_VARIABLES):
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT

HANGS_AFTER_S = 600
LONG_HANGS_AFTER_S = 3600
LONG_MARKERS = ("clients", "gpu", "slow", "stress")

gc.disable()  # until all tests are collected: hardly anything that imports make goes again

# A shell that starts us in the background has SIGINT ignored, and the programs that tests
# interrupt would inherit that. A handler of ours is not inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)

ENGINE_MODULE = "shmllm.engine"
OUR_FILES = "shmllm."
MARK = "SHMLLM_TEST_SESSION"
os.environ[MARK] = uuid.uuid4().hex  # engines inherit it; those of other sessions lack it
LEAK_GRACE_S = 5.0


def pytest_collection_finish() -> None:
    """What was imported stays, and looking for garbage does not look at it."""
    gc.freeze()
    gc.enable()


def _fail_what_hangs(number: int, frame: object) -> None:
    pytest.fail("the test hangs: it should have ended long ago, and waits at the line above")


@contextmanager
def _deadline(item: pytest.Item) -> Iterator[None]:
    """Ends whatever the test waits for, long after it ought to be over."""
    is_long = any(item.get_closest_marker(name) for name in LONG_MARKERS)
    signal.signal(signal.SIGALRM, _fail_what_hangs)
    signal.setitimer(signal.ITIMER_REAL, LONG_HANGS_AFTER_S if is_long else HANGS_AFTER_S, 30)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with _deadline(item):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with _deadline(item):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with _deadline(item):
        yield


def engine_processes() -> set[int]:
    """Pids of engine processes that descend from this session and are not zombies."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            is_engine = ENGINE_MODULE.encode() in (entry / "cmdline").read_bytes().split(b"\0")
            if is_engine and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def our_files() -> set[str]:
    """Names of ours in /dev/shm, less those that a process of another session made."""
    names = (name for name in os.listdir("/dev/shm") if name.startswith(OUR_FILES))
    return {name for name in names if not _is_of_another_session(Path("/dev/shm", name))}


def _is_of_another_session(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(CREATOR_PID_OFFSET)
            pid = int.from_bytes(file.read(8), "little")
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return not any(variable == f"{MARK}={os.environ[MARK]}".encode() for variable in variables)


@pytest.fixture(scope="session")
def compiled_kernels() -> None:
    """The first engine on a machine compiles its kernels, for longer than tests wait for one."""
    faulthandler.cancel_dump_traceback_later()
    LLM(multiprocess=False, kv_cache_memory_bytes=2**26).close()


@pytest.fixture
def no_leaks(compiled_kernels: None) -> Iterator[None]:
    """Fails the test if it leaves an engine process or a file in /dev/shm."""
    processes, files = engine_processes(), our_files()
    yield
    deadline = time.monotonic() + LEAK_GRACE_S
    while time.monotonic() < deadline:
        # A file whose maker has just died may be that of a session beside this one.
        left, new_files = engine_processes() - processes, our_files() - files
        if not left and not new_files:
            break
        time.sleep(0.05)
    assert not left, f"engine processes left: {left}"
    assert not new_files, f"files left in /dev/shm: {new_files}"
