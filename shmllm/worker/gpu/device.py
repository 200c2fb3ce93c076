"""A device that computes asynchronously: its memory, its events and its captured graphs.

Owns the interface, and CUDA's side of it. Work is done in the order in which it was asked for,
on one stream, the current one of torch: copies, kernels and graphs need no other order. Only
`copy_ahead` goes beside it. The tests have a second device, which is no GPU. Must not know what is
computed.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from shmllm.errors import EngineStartError
from shmllm.worker.arena import Arena
from shmllm.worker.gpu.arena import CudaArena
from shmllm.worker.gpu.plain_arena import PlainArena

_cuda: Any = torch.cuda  # in parts without annotations
LEAST_CAPABILITY = (8, 0)
"""Of what Triton compiles our kernels for: bfloat16 and asynchronous copies begin there."""


class Event(Protocol):
    """A point in the device's work. Until it was recorded it counts as reached."""

    def record(self) -> None:
        """It is reached when all that was asked for so far is done."""

    def wait(self) -> None:
        """Blocks the host until it is reached."""

    def is_done(self) -> bool:
        """Whether it is reached. Never blocks."""

    def elapsed_ms(self, since: Event) -> float:
        """The device's time from an earlier event to this one. Both measure, and are reached."""


class Graph(Protocol):
    """Work that was recorded. It does not keep alive what it reads and writes outside of the
    memory that was allocated while it was captured."""

    def replay(self) -> None:
        """Ask the device for all of it."""


class Device(Protocol):
    """
    Attributes:
        torch_device: for torch's factories.
        name: for people.
    """

    torch_device: torch.device
    name: str

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory that the device copies from and to while the host goes on. It lasts as
        long as the tensor; what it holds at first is undefined."""

    def copy_ahead(self, target: Tensor, source: Tensor) -> None:
        """Copy from pinned memory while the device does what it was asked for before, and before
        all that it will be asked for. Nothing that it has to do yet may use `target`."""

    def event(self, timing: bool = False) -> Event:
        """A new one; `timing` if it measures."""

    def capturing(self) -> AbstractContextManager[None]:
        """Around a series of captures. What is launched in it, but in no capture, runs as ever;
        it should be what is captured later, so that libraries have their workspaces."""

    def begin_capture(self) -> None:
        """From here on what is asked of the device is recorded instead. Nothing may wait for the
        device. Only within `capturing`."""

    def end_capture(self) -> Graph:
        """The recorded graph. All graphs share one pool of memory: what is allocated in a capture
        and dropped may be overwritten by the replay of any other."""

    def synchronize(self) -> None:
        """Blocks the host until nothing is left to do."""

    def free_bytes(self) -> int:
        """Memory that nobody has."""

    def total_bytes(self) -> int:
        """Memory that the device has."""

    def allocated_bytes(self) -> int:
        """Memory of torch's tensors, those of arenas left out."""

    def peak_bytes(self) -> int:
        """The most that `allocated_bytes` was since `reset_peak`."""

    def reset_peak(self) -> None:
        """The peak is what is allocated now."""

    def trim(self) -> None:
        """Give back the memory of tensors that are gone, which torch keeps for the next ones."""

    def make_arena(self, num_bytes: int, purpose: str) -> Arena:
        """Memory of this device; see `worker.arena`.

        Raises:
            EngineStartError: it does not have that much.
        """


class CudaEvent:
    """CUDA's own, on the current stream."""

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
    """A GPU, for the thread that makes this.

    Graphs live as long as this does: when the last one of a pool goes, torch drops the pool, and
    a later capture into it fails.

    Args:
        index: which of those that CUDA shows.

    Raises:
        EngineStartError: it cannot be used; says why.
    """

    def __init__(self, index: int = 0) -> None:
        if problem := find_cuda_problem(index):
            raise EngineStartError(problem)
        _cuda.set_device(index)
        torch.set_float32_matmul_precision("highest")  # images set TensorFloat-32 by environment
        self.torch_device = torch.device("cuda", index)
        self.name = str(_cuda.get_device_name(index))
        self._capture_stream = _cuda.Stream(self.torch_device)
        self._copy_stream = _cuda.Stream(self.torch_device)
        self._pool = _cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._capture: torch.cuda.CUDAGraph | None = None

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # Rounded up to a power of two, and kept by torch when it is free: for small ones.
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def copy_ahead(self, target: Tensor, source: Tensor) -> None:
        with _cuda.stream(self._copy_stream):
            target.copy_(source, non_blocking=True)
        _cuda.current_stream(self.torch_device).wait_stream(self._copy_stream)

    def event(self, timing: bool = False) -> Event:
        return CudaEvent(timing)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        was_enabled = gc.isenabled()
        gc.collect()
        gc.disable()  # a collection may free memory of the device, which ends a capture
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
        """Of a capture that an error cut short: the stream records until it is told to stop."""
        graph, self._capture = self._capture, None
        if graph is not None:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()

    def begin_capture(self) -> None:
        assert self._capture is None, "one capture at a time"
        assert _cuda.current_stream() == self._capture_stream, "only within capturing()"
        graph = _cuda.CUDAGraph()
        # torch keeps the generator's state from the first capture in the process for all others:
        # as inference tensors it would fail those outside of inference mode.
        with torch.inference_mode(False):
            # Other threads may allocate and copy meanwhile.
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
        """A `CudaArena`; a `PlainArena` where the driver cannot map memory, or the package
        cuda-bindings is not installed."""
        device = self.torch_device
        try:
            return CudaArena(num_bytes, purpose, device)
        except (ImportError, RuntimeError) as problem:
            return PlainArena(num_bytes, purpose, device, reason=str(problem))


def find_cuda_problem(index: int = 0) -> str:
    """Why a GPU cannot be used, in one sentence; empty if it can."""
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
    except RuntimeError as problem:  # the driver was found, and cannot serve this torch
        return f"cuda:{index} cannot be used: {str(problem).splitlines()[0]}"
    if capability < LEAST_CAPABILITY:
        return (
            f"cuda:{index} ({_cuda.get_device_name(index)}) has compute capability "
            f"{capability[0]}.{capability[1]}, and the kernels need "
            f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}"
        )
    return ""
