"""A device that computes asynchronously: its memory, its events and its captured graphs.

This module owns the interface, and its implementation with CUDA; the tests implement it without a
GPU. All work goes to one stream, torch's current one, and is done in the order in which it was
submitted; only `copy_ahead` and `beside` use others. This module must not know what is computed.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import permutations
from typing import Any, Protocol

import torch
from torch import Tensor

from shmllm.errors import EngineStartError
from shmllm.worker.arena import Arena
from shmllm.worker.gpu.arena import CudaArena
from shmllm.worker.gpu.plain_arena import PlainArena
from shmllm_kernels.gpu.configs import TABLE

_cuda: Any = torch.cuda  # some of its functions have no annotations
_CUBLAS = ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cublas-cu13")
_HOST_REGISTER_READ_ONLY = 8  # cudaHostRegisterReadOnly
LEAST_CAPABILITY = (8, 0)
"""The smallest compute capability that the Triton kernels are compiled for: bfloat16 and
asynchronous copies need it."""


class Event(Protocol):
    """A point in the device's work. An event that was never recorded counts as reached."""

    def record(self) -> None:
        """Place the event behind all work that was submitted so far."""

    def wait(self) -> None:
        """Block the host until the device has reached the event."""

    def is_done(self) -> bool:
        """Return whether the device has reached the event. Never blocks."""

    def elapsed_ms(self, since: Event) -> float:
        """Return the device's time from an earlier event to this one, in ms. Both events must have
        been made with `timing`, and the device must have reached them."""


class Graph(Protocol):
    """A captured CUDA graph. It keeps the memory alive that was allocated during its capture, and
    no other memory that it reads or writes."""

    def replay(self) -> None:
        """Launch the captured work."""


class Device(Protocol):
    """A device that computes asynchronously.

    Attributes:
        torch_device: the device for torch's factory functions.
        name: the device's name, for messages.
        uuid: a text that identifies the device in all processes.
    """

    torch_device: torch.device
    name: str
    uuid: str

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate pinned host memory, which the device copies from and to asynchronously. The
        memory lives as long as the tensor. Its initial contents are undefined."""

    def pin(self, memory: Tensor, is_writable: bool) -> bool:
        """Let the device copy asynchronously from and to host memory that is mapped already, until
        `unpin`. Called on a thread that launches nothing: a refusal leaves an error there, which
        the next launch would report.

        Args:
            memory: whole pages.
            is_writable: whether this process may write to them.

        Returns:
            False: the driver refuses. Copies make the host wait then.
        """

    def unpin(self, memory: Tensor) -> None:
        """End that; no copy is under way. Called on such a thread, too."""

    def numerics(self) -> dict[str, Any]:
        """Return what decides the bits of the device's results, beside the programs."""

    def copy_ahead(self, target: Tensor, source: Tensor) -> None:
        """Copy from pinned memory beside the work that was submitted before, and before all work
        that is submitted later. No work that was submitted before may use `target`."""

    def beside(self) -> AbstractContextManager[None]:
        """Return the context manager of work that does not wait for work that was submitted before.
        It may read what the device had written at an event that the host has waited for. At its
        end the host has waited for all of it."""

    def event(self, timing: bool = False) -> Event:
        """Make an event; `timing` lets it measure time."""

    def capturing(self) -> AbstractContextManager[None]:
        """Return the context manager of a series of captures. Work that is launched inside it and
        outside of a capture is executed. What will be captured should be executed there first, so
        that libraries allocate their workspaces."""

    def begin_capture(self) -> None:
        """Record all work from here on instead of executing it. Only within `capturing`. The host
        may not wait for the device until `end_capture`."""

    def end_capture(self) -> Graph:
        """Stop recording, and return the graph. All graphs share one memory pool: the replay of
        another graph may overwrite memory that was allocated and freed during this capture."""

    def synchronize(self) -> None:
        """Block the host until all submitted work is done."""

    def free_bytes(self) -> int:
        """Return the device's free memory, in bytes."""

    def total_bytes(self) -> int:
        """Return the device's memory, in bytes."""

    def allocated_bytes(self) -> int:
        """Return the memory of torch's tensors, without those in arenas, in bytes."""

    def peak_bytes(self) -> int:
        """Return the largest value of `allocated_bytes` since `reset_peak`."""

    def reset_peak(self) -> None:
        """Set the peak to what is allocated now."""

    def trim(self) -> None:
        """Give the memory of freed tensors back, which torch's allocator keeps."""

    def make_arena(self, num_bytes: int, purpose: str) -> Arena:
        """Allocate an arena in the device's memory.

        Args:
            num_bytes: the size of the arena.
            purpose: what the memory is for, for the error message.

        Raises:
            EngineStartError: the device does not have that much memory.
        """


class CudaEvent:
    """A CUDA event, on the current stream."""

    def __init__(self, timing: bool) -> None:
        self._event = _cuda.Event(enable_timing=timing)

    def record(self) -> None:
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def is_done(self) -> bool:
        return bool(self._event.query())

    def elapsed_ms(self, since: Event) -> float:
        assert isinstance(since, CudaEvent), "events of one device"
        return float(since._event.elapsed_time(self._event))


class CudaDevice:
    """A GPU. It becomes the current device of the thread that makes this object.

    The object keeps all captured graphs alive: torch drops a memory pool with its last graph, and
    a later capture into that pool fails.

    Args:
        index: the index among the devices that CUDA shows.

    Raises:
        EngineStartError: the GPU cannot be used; the message says why.
    """

    def __init__(self, index: int = 0) -> None:
        if problem := find_cuda_problem(index):
            raise EngineStartError(problem)
        _cuda.set_device(index)
        torch.set_float32_matmul_precision("highest")  # some container images enable TensorFloat-32
        self.torch_device = torch.device("cuda", index)
        self.name = str(_cuda.get_device_name(index))
        self.uuid = str(_cuda.get_device_properties(index).uuid)
        self._capture_stream = _cuda.Stream(self.torch_device)
        self._copy_stream = _cuda.Stream(self.torch_device)
        self._stream_beside = _cuda.Stream(self.torch_device)
        self._pool = _cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._capture: torch.cuda.CUDAGraph | None = None

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # torch rounds the size up to a power of two and keeps freed memory: for small tensors.
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def pin(self, memory: Tensor, is_writable: bool) -> bool:
        _cuda.set_device(self.torch_device)  # of this thread
        runtime = _cuda.cudart()
        flags = 0 if is_writable else _HOST_REGISTER_READ_ONLY
        found = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, flags)
        return bool(found == runtime.cudaError.success)

    def unpin(self, memory: Tensor) -> None:
        _cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def numerics(self) -> dict[str, Any]:
        """Return the kind of GPU, of which cuBLAS and the table of tiles choose kernels by its
        capability and its number of multiprocessors, that table, and the versions of the
        libraries."""
        found = _cuda.get_device_properties(self.torch_device)
        return {
            "name": self.name,
            "capability": [found.major, found.minor],
            "multiprocessors": found.multi_processor_count,
            "tiles": TABLE.digest,
            "cuda": torch.version.cuda,
            "cublas": [each for each in map(_version_of, _CUBLAS) if each],
        }

    def copy_ahead(self, target: Tensor, source: Tensor) -> None:
        with _cuda.stream(self._copy_stream):
            target.copy_(source, non_blocking=True)
        _cuda.current_stream(self.torch_device).wait_stream(self._copy_stream)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        with _cuda.stream(self._stream_beside):
            yield
        self._stream_beside.synchronize()

    def event(self, timing: bool = False) -> Event:
        return CudaEvent(timing)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        was_enabled = gc.isenabled()
        gc.collect()
        gc.disable()  # a collection may free device memory, which invalidates a capture
        self.synchronize()
        _cuda.empty_cache()  # graphs allocate from a pool of their own
        try:
            with _cuda.stream(self._capture_stream):
                try:
                    yield
                finally:
                    self._abandon_capture()
                self.synchronize()
        finally:
            if was_enabled:
                gc.enable()

    def _abandon_capture(self) -> None:
        """End a capture that an error interrupted: the stream would go on recording."""
        graph, self._capture = self._capture, None
        if graph is not None:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()

    def begin_capture(self) -> None:
        assert self._capture is None, "one capture at a time"
        assert _cuda.current_stream() == self._capture_stream, "only within capturing()"
        graph = _cuda.CUDAGraph()
        # The first capture in a process creates the random generator's state tensors, and torch
        # uses them in all later captures. As inference tensors they would make captures outside
        # of inference mode fail.
        with torch.inference_mode(False):
            # Thread-local: other threads may allocate and copy during the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._capture = graph
        self._graphs.append(graph)

    def end_capture(self) -> Graph:
        graph, self._capture = self._capture, None
        assert graph is not None, "nothing is being captured"
        graph.capture_end()
        return graph

    def synchronize(self) -> None:
        _cuda.synchronize(self.torch_device)

    def free_bytes(self) -> int:
        return int(_cuda.mem_get_info(self.torch_device)[0])

    def total_bytes(self) -> int:
        return int(_cuda.mem_get_info(self.torch_device)[1])

    def allocated_bytes(self) -> int:
        return int(_cuda.memory_allocated(self.torch_device))

    def peak_bytes(self) -> int:
        return int(_cuda.max_memory_allocated(self.torch_device))

    def reset_peak(self) -> None:
        _cuda.reset_peak_memory_stats(self.torch_device)

    def trim(self) -> None:
        _cuda.empty_cache()

    def make_arena(self, num_bytes: int, purpose: str) -> Arena:
        """Allocate a `CudaArena`, or a `PlainArena` if the driver cannot map memory or the package
        cuda-bindings is missing."""
        device = self.torch_device
        try:
            return CudaArena(num_bytes, purpose, device)
        except (ImportError, RuntimeError) as problem:
            return PlainArena(num_bytes, purpose, device, reason=str(problem))


def _version_of(package: str) -> str:
    """Return the version of an installed package; empty: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def find_cuda_problem(index: int = 0) -> str:
    """Return one sentence that says why a GPU cannot be used; empty if it can be used."""
    if torch.version.cuda is None:
        return f"there is no GPU to use: torch {torch.__version__} was built without CUDA"
    count = _cuda.device_count()
    if count == 0:
        return (
            "there is no GPU to use: CUDA finds no device; either there is none, or no driver, "
            "or CUDA_VISIBLE_DEVICES hides it"
        )
    if index >= count:
        return (
            f"there is no cuda:{index}: CUDA finds {count} device(s), the last is cuda:{count - 1}"
        )
    try:
        capability = _cuda.get_device_capability(index)
    except RuntimeError as problem:  # a driver exists, and does not work with this torch
        return f"cuda:{index} cannot be used: {str(problem).splitlines()[0]}"
    if capability < LEAST_CAPABILITY:
        return (
            f"cuda:{index} ({_cuda.get_device_name(index)}) has compute capability "
            f"{capability[0]}.{capability[1]}, and the kernels need "
            f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}"
        )
    return ""


def find_link_problem(indices: Sequence[int], bindings: Any = None) -> str:
    """Return one sentence that says why GPUs cannot meet as the ranks of a group; empty if they
    can. They read each other's memory, and change words in it atomically.

    Args:
        indices: the indices of the GPUs.
        bindings: the module `cuda.bindings.driver`, or a fake in tests; None imports it.
    """
    try:
        driver = bindings or import_module("cuda.bindings.driver")
    except ImportError:
        return "the package cuda-bindings is missing"
    success = driver.CUresult.CUDA_SUCCESS
    if driver.cuInit(0)[0] != success:
        return "the CUDA driver cannot be used"
    kinds = driver.CUdevice_P2PAttribute
    needed = {
        kinds.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED: "map the memory of",
        kinds.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: "change memory atomically on",
    }
    for one, other in permutations(indices, 2):
        for kind, what in needed.items():
            result, value = driver.cuDeviceGetP2PAttribute(kind, one, other)
            if result != success or not value:
                return f"cuda:{one} cannot {what} cuda:{other}, which NVLink allows"
    return ""
