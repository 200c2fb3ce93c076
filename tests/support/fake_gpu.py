"""The double of a GPU: tensors of the CPU, Triton's interpreter, and a queue of work to do.

Tensors on it are made with its `torch_device`, ``cpu:0``; those made with ``cpu``, or with no
device, are the host's. What is asked of it, an operation of torch or the launch of a kernel, goes
into a queue, and is done when `progress` says so, or when the host waits. So the host is as far
ahead of the device as a test wants, and what it overwrites too early shows in the numbers. A graph
is the list of what was asked for while it was captured, and its replay does that on the same
memory: numbers are those of the capture, tensors are read anew.

Memory that was not written yet is NaN, or -77.
"""

from __future__ import annotations

import contextlib
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
"""Told how much is queued, says how much of it is done before the host goes on."""


def eager(queued: int) -> int:
    """All: the device is done before the host looks."""
    return queued


def lazy(queued: int) -> int:
    """Nothing: the device works only when the host waits for it."""
    return 0


class InterpretedEvent:
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
        return (self._time_s - since._time_s) * 1e3


class RecordedGraph:
    """A graph. Pauses the memory that was allocated while it was captured, and no other: replaying
    it when a tensor from outside is gone raises, where a GPU would read what is there now."""

    def __init__(self, device: FakeGpu) -> None:
        self._device = device
        self.operations: list[Operation] = []
        self._own: list[tuple[Tensor, weakref.ref[Any]]] = []
        self._outside: dict[int, weakref.ref[Any]] = {}

    def replay(self) -> None:
        self._device.refuse_in_capture("replaying a graph")
        gone = sum(storage() is None for storage in self._outside.values())
        assert not gone, f"the graph uses {gone} tensor(s) that were freed since its capture"
        self._device.submit(Operation("graph", self._run))

    def _run(self) -> None:
        for memory, user in self._own:
            if user() is None:  # another graph may have had it meanwhile
                poison(memory)
        for operation in self.operations:
            operation.run()

    def allocate(self, like: Tensor) -> Tensor:
        """Memory of the pool, for a tensor that the capture makes."""
        memory = poison(torch.empty(_span(like), dtype=like.dtype))
        tensor = _at(memory.untyped_storage(), like, 0)
        storage = tensor.untyped_storage()
        storage.memory = memory
        self._own.append((memory, weakref.ref(storage)))
        return tensor

    def borrow(self, tensor: Tensor) -> Tensor:
        """The same memory, but not kept alive."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return tensor
        if all(user() is not storage for _, user in self._own):
            self._outside[storage.data_ptr()] = weakref.ref(storage)
        return _at(storage, tensor, tensor.storage_offset())


class FakeGpu:
    """Active as a context manager: `with FakeGpu() as device`.

    Args:
        progress: how fast it is.
        total_bytes: of memory that it says to have.

    Attributes:
        progress: as given; may be changed.
        may_wait: whether the host may wait without saying so, by reading a tensor say.
        launched: what was asked for, in order, by name: "graph" for a replay.
    """

    torch_device = DEVICE
    name = "interpreted"

    def __init__(self, progress: Progress = eager, total_bytes: int = 2**30) -> None:
        self.launched: list[str] = []
        self.may_wait = True
        self.is_passing = False
        self.progress = progress
        self._total_bytes = total_bytes
        self._arena_bytes = self._allocated_bytes = self._peak_bytes = 0
        self._queue: deque[Operation] = deque()
        self._num_queued = self._num_done = 0
        self._is_in_capturing = False
        self._kernels: RecordedGraph | None = None
        self._intercept = Intercept(self)

    def __enter__(self) -> FakeGpu:
        self._intercept.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._intercept.__exit__(*details)

    # The protocol.

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = poison(torch.empty(shape, dtype=dtype))
        tensor.untyped_storage().is_pinned_host = True
        return tensor

    def copy_ahead(self, target: Tensor, source: Tensor) -> None:
        """As early as can be: before all that is in the queue."""
        self.refuse_in_capture("a copy on another stream")
        self.launched.append("copy ahead")
        with self.passing(), torch.inference_mode():
            target.copy_(source)

    def event(self, timing: bool = False) -> InterpretedEvent:
        return InterpretedEvent(self)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        self.synchronize()
        self._is_in_capturing = True
        try:
            yield
        finally:
            self._is_in_capturing, self._kernels = False, None
        self.synchronize()

    def begin_capture(self) -> None:
        assert self._is_in_capturing, "only within capturing()"
        assert self._kernels is None, "one capture at a time"
        self._kernels = RecordedGraph(self)

    def end_capture(self) -> RecordedGraph:
        program, self._kernels = self._kernels, None
        assert program is not None, "nothing is being captured"
        return program

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
        return InterpretedArena(self, num_bytes, purpose)

    def count_arena(self, num_bytes: int) -> None:
        """Of an arena's memory that comes, or goes."""
        if num_bytes > self.free_bytes():
            raise MemoryError(f"{num_bytes:,} of {self.free_bytes():,} bytes")
        self._arena_bytes += num_bytes

    # What is asked of it.

    def submit(self, operation: Operation) -> None:
        """Have it done, or recorded."""
        if self._kernels is not None:
            self._kernels.operations.append(operation)
            return
        self.launched.append(operation.name)
        self.enqueue(operation)

    def enqueue(self, operation: Operation) -> int:
        """Its number, to wait for."""
        self._queue.append(operation)
        self._num_queued += 1
        number = self._num_queued
        self._advance()
        return number

    def work_up_to(self, number: int) -> None:
        while self._num_done < number:
            operation = self._queue.popleft()
            self._num_done += 1
            with self.passing(), torch.inference_mode(), _quiet():
                try:
                    operation.run()
                except Exception as problem:
                    problem.add_note(f"on the device, in {operation.name}")
                    raise

    def has_done(self, number: int) -> bool:
        self._advance()
        return self._num_done >= number

    def _advance(self) -> None:
        self.work_up_to(self._num_done + min(self.progress(len(self._queue)), len(self._queue)))

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """What is called in it is not intercepted."""
        before, self.is_passing = self.is_passing, True
        try:
            yield
        finally:
            self.is_passing = before

    def refuse_in_capture(self, what: str) -> None:
        if self._kernels is not None:
            raise RuntimeError(f"{what} is not permitted while a graph is captured")

    def wait_unasked(self, what: str) -> None:
        """For what makes the host wait without saying so."""
        self.refuse_in_capture(what)
        if not self.may_wait:
            raise RuntimeError(f"{what} makes the host wait for the device")
        self.synchronize()

    # Its memory.

    def allocate(self, like: Tensor) -> Tensor:
        """A tensor of the sizes and strides of one on the meta device; not written yet."""
        if self._kernels is not None:
            tensor = self._kernels.allocate(like)
        else:
            tensor = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
            poison(tensor)
        mark(tensor)
        storage = tensor.untyped_storage()
        self._count(storage.nbytes())
        weakref.finalize(storage, self._count, -storage.nbytes()).atexit = False
        return tensor

    def borrowed(self, tensor: Tensor) -> Tensor:
        """As an operation has it: one in a queue keeps it, one in a graph does not."""
        return tensor if self._kernels is None else self._kernels.borrow(tensor)

    def _count(self, num_bytes: int) -> None:
        self._allocated_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self._allocated_bytes)


class InterpretedArena(HostArena):
    """Memory of the device that can be given back."""

    def __init__(self, device: FakeGpu, num_bytes: int, purpose: str) -> None:
        self._device = device
        with device.passing():
            super().__init__(num_bytes, purpose)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with self._device.passing():
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
    """As memory that nobody wrote."""
    if tensor.dtype is torch.bool:
        return tensor.fill_(True)
    if tensor.dtype.is_floating_point:
        return tensor.fill_(torch.nan)
    return tensor.fill_(-77 if tensor.dtype.is_signed else 77)


def _span(tensor: Tensor) -> int:
    """Elements from the first to the last."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _at(storage: torch.UntypedStorage, like: Tensor, offset: int) -> Tensor:
    """A tensor on that memory which does not keep it alive."""
    other = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), HOST, storage.nbytes()
    )
    return torch.empty(0, dtype=like.dtype).set_(other, offset, like.size(), like.stride())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The interpreter computes with numpy, and masked elements too. That of Triton 3.6 makes
    numbers of arrays in a way that numpy is to drop."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
