"""Fixtures and hooks of all tests: leaks, deadlines, random numbers, and the order of files.

Around a test that starts processes, `no_leaks` checks that it leaves no engine process and no
file of shmllm in /dev/shm. A test that hangs fails after ten to twenty minutes. Workers of
pytest-xdist take the files that take longest first.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from zlib import crc32

import pytest

from shmllm import LLM
from shmllm.cli.options import MODEL_VARIABLE
from shmllm.config.environment import SPIN_COUNT, WAITING_VARIABLES
from shmllm.ipc.folder import find
from shmllm.ipc.layout import CREATOR_PID_OFFSET
from shmllm.ipc.registry import SHM_DIRECTORY
from shmllm.shared_kv.folder import DIRECTORY_VARIABLE

# libgomp reads it when torch is loaded, which no import above does. The compute threads of this
# process, of transformers and of engines in the caller's process, would otherwise spin for
# milliseconds on cores that other tests need. Engine processes are started with the same value.
if not os.environ.keys() & set(WAITING_VARIABLES):
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT

# The default model of commands depends on what is installed; what tests expect must not.
os.environ[MODEL_VARIABLE] = "tiny"

HANGS_AFTER_S = 1200
LONG_HANGS_AFTER_S = 3600
LONG_MARKERS = ("clients", "gpu", "slow", "stress")

TESTS = Path(__file__).parent
SLOWEST_FILES = (
    "unit/worker/test_gpu_interpreted.py",
    "e2e/test_tensor_parallel_lora.py",
    "unit/kernels/test_triton.py",
    "unit/kernels/test_triton_compiles.py",
    "process/test_ranks.py",
    "process/test_pool.py",
    "e2e/test_parallel.py",
    "process/test_examples.py",
    "process/test_kill_matrix.py",
    "e2e/test_embeddings.py",
    "process/test_batch_files.py",
    "process/test_embed_files.py",
    "process/test_trace.py",
    "process/test_cli.py",
    "e2e/test_greedy.py",
    "process/test_death.py",
    "process/test_sleeping_engines.py",
    "e2e/test_deterministic.py",
    "e2e/test_async_scheduling.py",
    "e2e/test_logprobs.py",
    "process/test_streams.py",
    "process/test_launch.py",
    "e2e/test_logprob_diff.py",
    "process/test_weight_updates.py",
    "process/test_device_weight_updates.py",
    "process/test_bench.py",
    "process/test_named_engine.py",
    "process/test_top.py",
    "process/test_fork.py",
    "process/test_worker_calls.py",
    "process/test_gpu_check.py",
    "process/test_small_shm.py",
)
"""The files that take longest, longest first."""

gc.disable()  # until all tests are collected: most objects that imports create live on

# A shell that starts pytest in the background makes it ignore SIGINT, and so would the programs
# that tests start and interrupt. Programs do not inherit a handler.
signal.signal(signal.SIGINT, signal.default_int_handler)

ENGINE_MODULE = "shmllm.engine"
RANK_MODULE = "shmllm.parallel"
FAKE_GPU_RANK_MODULE = "support.fake_gpu_rank"
MARK = "SHMLLM_TEST_SESSION"
os.environ[MARK] = uuid.uuid4().hex  # engines of this session inherit it
REGIONS = Path(f"/dev/shm/shmllm-tests-{os.environ[MARK]}")
os.environ[DIRECTORY_VARIABLE] = str(REGIONS)
atexit.register(shutil.rmtree, REGIONS, ignore_errors=True)
LEAK_GRACE_S = 5.0


_FOLDERS_BEFORE = find(SHM_DIRECTORY)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the folder of names that this session made; the workers of pytest-xdist have ended."""
    if not hasattr(config, "workerinput"):
        for folder in find(SHM_DIRECTORY):
            if folder not in _FOLDERS_BEFORE:
                with suppress(OSError):  # an engine that is not of this session uses it now
                    folder.rmdir()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slowest files first: a worker that took one last would run alone at the end.

    Needs `--no-loadscope-reorder`, which tools/test passes.
    """
    places = {TESTS / name: place for place, name in enumerate(SLOWEST_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Exempt all imported modules from garbage collection."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def exempt_what_lives_on() -> None:
    """Exempt what the files before keep, such as compiled kernels: each collection that a test asks
    for would otherwise look at millions of objects."""
    gc.collect()
    gc.freeze()


def _fail_test(number: int, frame: object) -> None:
    pytest.fail("the test hangs: it should have ended long ago, and waits at the line above")


@contextmanager
def _deadline(item: pytest.Item) -> Iterator[None]:
    """Fail a test that hangs, whatever it waits for in its main thread."""
    is_long = any(item.get_closest_marker(name) for name in LONG_MARKERS)
    signal.signal(signal.SIGALRM, _fail_test)
    signal.setitimer(signal.ITIMER_REAL, LONG_HANGS_AFTER_S if is_long else HANGS_AFTER_S, 30)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Let each run of a test draw the same tensors: what fails once fails again."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(crc32(item.nodeid.encode()))
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


def engine_processes(*modules: str) -> set[int]:
    """Pids of processes that run the engine's module, or one of others, descend from this session
    and are not zombies."""
    names = {module.encode() for module in modules or (ENGINE_MODULE,)}
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            is_engine = not names.isdisjoint((entry / "cmdline").read_bytes().split(b"\0"))
            if is_engine and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def _all_processes() -> set[int]:
    return engine_processes(ENGINE_MODULE, RANK_MODULE, FAKE_GPU_RANK_MODULE)


def our_files() -> set[str]:
    """Files of shmllm, relative to /dev/shm, that no process of another session created."""
    paths = [path for folder in find(SHM_DIRECTORY) for path in folder.iterdir()]
    return {
        str(path.relative_to(SHM_DIRECTORY)) for path in paths if not _is_of_another_session(path)
    }


def _is_of_another_session(path: Path) -> bool:
    if path.is_dir():  # regions of a shared KV cache, which outlive the processes
        return False
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            file.seek(CREATOR_PID_OFFSET)
            pid = int.from_bytes(file.read(8), "little")
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return not any(variable == f"{MARK}={os.environ[MARK]}".encode() for variable in variables)


@pytest.fixture(scope="session")
def compiled_kernels() -> None:
    """Start an engine once: on a new machine it compiles the kernels, which takes long."""
    faulthandler.cancel_dump_traceback_later()
    LLM(multiprocess=False, kv_cache_memory_bytes=2**26).close()


@contextmanager
def without_leaks() -> Iterator[None]:
    """Fails if the block leaves a process of an engine or a file in /dev/shm."""
    processes, files = _all_processes(), our_files()
    yield
    deadline = time.monotonic() + LEAK_GRACE_S
    while time.monotonic() < deadline:
        # A file whose creator just died may belong to another session: look again.
        left = _all_processes() - processes
        new_files = our_files() - files
        if not left and not new_files:
            break
        time.sleep(0.05)
    assert not left, f"engine processes left: {left}"
    assert not new_files, f"files left in /dev/shm: {new_files}"


@pytest.fixture
def own_regions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for the KV caches that engines share, of this test alone."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="shmllm-test-"))
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(directory))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@pytest.fixture
def no_leaks(compiled_kernels: None) -> Iterator[None]:
    """Fails the test if it leaves a process of an engine or a file in /dev/shm."""
    with without_leaks():
        yield
