"""The fake GPU: it computes on tensors of the CPU with Triton's interpreter, asynchronously.

Tensors that are made with the fake GPU's `torch_device`, ``cpu:0``, are on the device; tensors that
are made with ``cpu`` or without a device are the host's. Operations of torch on device tensors and
launches of kernels go into a queue, and are executed when `progress` says so or when the host
waits. A test thereby decides how far the host is ahead of the device, and if the host overwrites
memory too early the results are wrong. A graph is the list of the operations that were submitted
during its capture. A replay executes them on the same memory: Python numbers have their values of
the capture, and tensors are read again.

Memory that has not been written holds NaN, or -77 in integers.
"""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from support.fake_gpu_operations import HOST, Intercept, Operation, mark
from torch import Tensor

from shmllm.worker.arena import Arena, Contents
from shmllm.worker.cpu.arena import HostArena

DEVICE = torch.device("cpu", 0)

Progress = Callable[[int], int]
"""Takes the number of queued operations, and returns how many of them are executed before the host
continues."""


def eager(queued: int) -> int:
    """Execute all operations: the device is never behind the host."""
    return queued


def lazy(queued: int) -> int:
    """Execute nothing: the device works only when the host waits for it."""
    return 0


class FakeEvent:
    """An event in the queue of the fake GPU."""

    def __init__(self, device: FakeGpu) -> None:
        self._device = device
        self._number = 0
        self._time_s = 0.0

    def record(self) -> None:
        self._device.refuse_in_capture("recording an event")
        self._number = self._device.enqueue(Operation("event", self._reach))

    def _reach(self) -> None:
        self._time_s = time.perf_counter()

    def wait(self) -> None:
        self._device.refuse_in_capture("waiting for an event")
        self._device.work_up_to(self._number)

    def is_done(self) -> bool:
        return self._device.has_done(self._number)

    def elapsed_ms(self, since: Any) -> float:
        assert self.is_done()
        assert since.is_done()
        return float(self._time_s - since._time_s) * 1e3


class FakeGraph:
    """A captured graph. It keeps the memory alive that was allocated during its capture, and no
    other. A replay raises AssertionError if a tensor from outside was freed; a GPU would read
    whatever the memory holds by then."""

    def __init__(self, device: FakeGpu) -> None:
        self._device = device
        self.operations: list[Operation] = []
        self._own: list[tuple[Tensor, weakref.ref[Any]]] = []
        self._outside: dict[int, weakref.ref[Any]] = {}

    def replay(self) -> None:
        self._device.refuse_in_capture("replaying a graph")
        freed = sum(storage() is None for storage in self._outside.values())
        assert not freed, f"the graph uses {freed} tensor(s) that were freed since its capture"
        self._device.submit(Operation("graph", self._run))

    def _run(self) -> None:
        for memory, user in self._own:
            if user() is None:  # another graph may have used it meanwhile
                poison(memory)
        for operation in self.operations:
            operation.run()

    def allocate(self, like: Tensor) -> Tensor:
        """Allocate a tensor in the graphs' memory pool, with the sizes and strides of `like`."""
        memory = poison(torch.empty(_span(like), dtype=like.dtype))
        tensor = _at(memory.untyped_storage(), like, 0)
        storage = tensor.untyped_storage()
        storage.memory = memory  # type: ignore[attr-defined]
        self._own.append((memory, weakref.ref(storage)))
        return tensor

    def borrow(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the same memory that does not keep it alive."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return tensor
        if all(user() is not storage for _, user in self._own):
            self._outside[storage.data_ptr()] = weakref.ref(storage)
        return _at(storage, tensor, int(tensor.storage_offset()))


class FakeGpu:
    """A fake GPU, active as a context manager: `with FakeGpu() as device`.

    Args:
        progress: decides how fast the device is.
        total_bytes: the size of its memory.

    Attributes:
        progress: as given; may be changed.
        may_wait: whether the host may wait implicitly, for example by reading a tensor.
        is_bypassed: whether operations are executed directly instead of queued.
        computes: whether queued operations are executed when their turn comes. Tests that look at
            launches alone save most of their time without.
        refuses_pins: whether `pin` refuses.
        num_pinned: how many tensors are pinned by `pin`.
        launched: the names of the submitted operations, in order; "graph" for a replay.
    """

    torch_device = DEVICE
    name = "fake GPU"
    uuid = "fake-gpu"

    def __init__(self, progress: Progress = eager, total_bytes: int = 2**30) -> None:
        self.launched: list[str] = []
        self.may_wait = True
        self.is_bypassed = False
        self.computes = True
        self.refuses_pins = False
        self.num_pinned = 0
        self.progress = progress
        self._total_bytes = total_bytes
        self._arena_bytes = self._allocated_bytes = self._peak_bytes = 0
        self._queue: deque[Operation] = deque()
        self._num_queued = self._num_done = 0
        self._is_in_capturing = False
        self._graph: FakeGraph | None = None
        self._intercept = Intercept(self)

    def __enter__(self) -> FakeGpu:
        self._intercept.open()
        return self

    def __exit__(self, *details: object) -> None:
        self._intercept.close()

    @property
    def is_capturing(self) -> bool:
        """Whether a graph is being captured."""
        return self._graph is not None

    # The protocol `Device`.

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = poison(torch.empty(shape, dtype=dtype))
        tensor.untyped_storage().is_pinned_host = True  # type: ignore[attr-defined]
        return tensor

    def pin(self, memory: Tensor, is_writable: bool) -> bool:
        if self.refuses_pins:
            return False
        memory.untyped_storage().is_pinned_host = True  # type: ignore[attr-defined]
        self.num_pinned += 1
        return True

    def unpin(self, memory: Tensor) -> None:
        memory.untyped_storage().is_pinned_host = False  # type: ignore[attr-defined]
        self.num_pinned -= 1

    def numerics(self) -> dict[str, Any]:
        return {"name": self.name}

    def copy_ahead(self, target: Tensor, source: Tensor) -> None:
        """Copy as early as possible: before all queued operations."""
        self.refuse_in_capture("a copy on another stream")
        self.launched.append("copy ahead")
        with self.bypassed(), torch.inference_mode():
            target.copy_(source)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Execute before all queued operations, in memory that is not counted."""
        self.refuse_in_capture("work on another stream")
        self.launched.append("beside")
        with self.bypassed():
            yield

    def event(self, timing: bool = False) -> FakeEvent:
        return FakeEvent(self)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        self.synchronize()
        self._is_in_capturing = True
        try:
            yield
        finally:
            self._is_in_capturing, self._graph = False, None
        self.synchronize()

    def begin_capture(self) -> None:
        assert self._is_in_capturing, "only within capturing()"
        assert self._graph is None, "one capture at a time"
        self._graph = FakeGraph(self)

    def end_capture(self) -> FakeGraph:
        graph, self._graph = self._graph, None
        assert graph is not None, "nothing is being captured"
        return graph

    def synchronize(self) -> None:
        self.refuse_in_capture("synchronizing")
        self.work_up_to(self._num_queued)

    def free_bytes(self) -> int:
        return self._total_bytes - self._allocated_bytes - self._arena_bytes

    def total_bytes(self) -> int:
        return self._total_bytes

    def allocated_bytes(self) -> int:
        return self._allocated_bytes

    def peak_bytes(self) -> int:
        return self._peak_bytes

    def reset_peak(self) -> None:
        self._peak_bytes = self._allocated_bytes

    def trim(self) -> None:
        pass

    def make_arena(self, num_bytes: int, purpose: str) -> Arena:
        self.count_arena(num_bytes)
        return FakeArena(self, num_bytes, purpose)

    def count_arena(self, num_bytes: int) -> None:
        """Count memory that an arena takes, or gives back if negative. Raises MemoryError."""
        if num_bytes > self.free_bytes():
            raise MemoryError(f"{num_bytes:,} of {self.free_bytes():,} bytes")
        self._arena_bytes += num_bytes

    # Operations.

    def submit(self, operation: Operation) -> None:
        """Queue an operation, or record it during a capture."""
        if self._graph is not None:
            self._graph.operations.append(operation)
            return
        self.launched.append(operation.name)
        self.enqueue(operation)

    def enqueue(self, operation: Operation) -> int:
        """Queue an operation. Returns its number for `work_up_to` and `has_done`."""
        self._queue.append(operation)
        self._num_queued += 1
        number = self._num_queued
        self._advance()
        return number

    def work_up_to(self, number: int) -> None:
        """Execute the operations up to this number."""
        while self._num_done < number:
            operation = self._queue.popleft()
            self._num_done += 1
            if not self.computes:
                continue
            with self.bypassed(), torch.inference_mode(), _without_modes(), _quiet():
                try:
                    operation.run()
                except Exception as problem:
                    problem.add_note(f"on the device, in {operation.name}")
                    raise

    def has_done(self, number: int) -> bool:
        """Let the device progress, and return whether it has done this operation."""
        self._advance()
        return self._num_done >= number

    def _advance(self) -> None:
        self.work_up_to(self._num_done + min(self.progress(len(self._queue)), len(self._queue)))

    @contextlib.contextmanager
    def bypassed(self) -> Iterator[None]:
        """Execute operations directly inside this context, without queueing them."""
        before, self.is_bypassed = self.is_bypassed, True
        try:
            yield
        finally:
            self.is_bypassed = before

    def refuse_in_capture(self, what: str) -> None:
        """Raise RuntimeError during a capture."""
        if self._graph is not None:
            raise RuntimeError(f"{what} is not permitted while a graph is captured")

    def wait_implicitly(self, what: str) -> None:
        """Wait for all operations, for a call that makes the host wait implicitly. Raises
        RuntimeError if that is not allowed."""
        self.refuse_in_capture(what)
        if not self.may_wait:
            raise RuntimeError(f"{what} makes the host wait for the device")
        self.synchronize()

    # Memory.

    def allocate(self, like: Tensor) -> Tensor:
        """Allocate a device tensor with the sizes and strides of a meta tensor. Raises
        OutOfMemoryError."""
        num_bytes = _span(like) * like.dtype.itemsize
        if num_bytes > self.free_bytes():
            gc.collect()  # Triton's interpreter leaves cycles with the arguments of each launch
        if num_bytes > self.free_bytes():
            raise torch.OutOfMemoryError(f"{num_bytes:,} of {self.free_bytes():,} bytes")
        if self._graph is not None:
            tensor = self._graph.allocate(like)
        else:
            tensor = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
            poison(tensor)
        mark(tensor)
        storage = tensor.untyped_storage()
        self._count(storage.nbytes())
        weakref.finalize(storage, self._count, -storage.nbytes()).atexit = False
        return tensor

    def borrowed(self, tensor: Tensor) -> Tensor:
        """Return the tensor as an operation holds it: a queued operation keeps its memory alive,
        and an operation of a graph does not."""
        return tensor if self._graph is None else self._graph.borrow(tensor)

    def _count(self, num_bytes: int) -> None:
        self._allocated_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self._allocated_bytes)


class FakeArena(HostArena):
    """An arena in the fake GPU's memory."""

    def __init__(self, device: FakeGpu, num_bytes: int, purpose: str) -> None:
        self._device = device
        with device.bypassed():
            super().__init__(num_bytes, purpose)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with self._device.bypassed():
            return mark(super().allocate(shape, dtype))

    def release(self, keep: bool = False) -> None:
        self._device.synchronize()
        self._device.count_arena(-self.resident_bytes)
        super().release(keep)

    def restore(self) -> None:
        self._device.count_arena(self.num_bytes - self.resident_bytes)
        super().restore()

    @property
    def resident_bytes(self) -> int:
        return self.num_bytes if self.contents is Contents.PRESENT else 0


def poison(tensor: Tensor) -> Tensor:
    """Fill a tensor with the values of memory that has not been written."""
    if tensor.dtype is torch.bool:
        return tensor.fill_(True)
    if tensor.dtype.is_floating_point:
        return tensor.fill_(torch.nan)
    return tensor.fill_(-77 if tensor.dtype.is_signed else 77)


def _span(tensor: Tensor) -> int:
    """Return the number of elements from a tensor's first to its last one, with gaps."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _at(storage: torch.UntypedStorage, like: Tensor, offset: int) -> Tensor:
    """Return a tensor like `like` on that memory that does not keep it alive."""
    other = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), HOST, storage.nbytes()
    )
    return torch.empty(0, dtype=like.dtype).set_(other, offset, like.size(), like.stride())


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    """Keep torch from asking the modes of `Intercept`, which let everything through here."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings of Triton's interpreter: it computes masked elements with numpy, too, and
    Triton 3.6 converts arrays to numbers in a way that numpy deprecates."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
