"""Runs code of a GPU without its device, and compiles the Triton kernels that it launches.

Whatever is made on "cuda" is made elsewhere: on "meta", where tensors have sizes and no contents,
or on the CPU. Launches compute nothing and compile their kernel into Triton's cache on disk, where
a later launch on the GPU finds it. So the list of kernels is what the engine really launches when
it starts. Nothing here touches a GPU, and the process of a dry run can do nothing else.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import jit
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from shmllm.worker import loading
from shmllm.worker.arena import Contents
from shmllm.worker.gpu.device import Event, Graph

CUDA = torch.device("cuda", 0)
META = torch.device("meta")
FREE_BYTES = 2**40


@dataclass(frozen=True)
class Card:
    """What the choice and the compilation of kernels depend on.

    Attributes:
        capability: the compute capability.
        processors: the number of multiprocessors.
    """

    capability: tuple[int, int]
    processors: int


class DryEvent:
    """An event that was reached."""

    def record(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def is_done(self) -> bool:
        return True

    def elapsed_ms(self, since: Event) -> float:
        return 0.0


class DryGraph:
    """A graph whose replay does nothing."""

    def replay(self) -> None:
        pass


class DryArena:
    """An arena of tensors that lie somewhere else."""

    def __init__(self, num_bytes: int, where: torch.device) -> None:
        self.num_bytes = num_bytes
        self.contents = Contents.PRESENT
        self._where = where

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._where)

    def release(self, keep: bool = False) -> None:
        pass

    def restore(self) -> None:
        pass

    @property
    def resident_bytes(self) -> int:
        return self.num_bytes


class DryDevice:
    """A `Device` that executes nothing."""

    torch_device = CUDA
    name = uuid = "a dry run"

    def __init__(self, where: torch.device) -> None:
        self._where = where

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def copy_ahead(self, target: Tensor, source: Tensor) -> None:
        pass

    def beside(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def event(self, timing: bool = False) -> Event:
        return DryEvent()

    def capturing(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def begin_capture(self) -> None:
        pass

    def end_capture(self) -> Graph:
        return DryGraph()

    def synchronize(self) -> None:
        pass

    def free_bytes(self) -> int:
        return FREE_BYTES

    def total_bytes(self) -> int:
        return FREE_BYTES

    def allocated_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0

    def reset_peak(self) -> None:
        pass

    def trim(self) -> None:
        pass

    def make_arena(self, num_bytes: int, purpose: str) -> Any:
        return DryArena(num_bytes, self._where)


class _Elsewhere(TorchFunctionMode):
    """Makes tensors somewhere else that would be on a GPU."""

    def __init__(self, where: torch.device) -> None:
        super().__init__()
        self._where = where

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(torch.device, self._place, (args, kwargs or {}))
        return function(*args, **kwargs)

    def _place(self, device: torch.device) -> torch.device:
        return self._where if device.type == "cuda" else device


class _AbsentDriver:
    """The part of Triton's driver that compiling needs."""

    def __init__(self, card: Card) -> None:
        major, minor = card.capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


class Launches:
    """The kernels that are launched inside the context `dry_run`.

    Args:
        chosen: called with the number of each new kernel; whether this process compiles it.

    Attributes:
        seconds: the time that compiling took, by kernel and number.
        errors: the first line of the compiler's message, by kernel and number.
        numbers: the number of each kernel that was launched, by its name and Triton's key, those
            that other processes compile included.
    """

    def __init__(self, chosen: Callable[[int], bool]) -> None:
        self.seconds: dict[str, float] = {}
        self.errors: dict[str, str] = {}
        self.numbers: dict[tuple[str, str], int] = {}
        self._chosen = chosen
        self._current = ""

    def refuse(self, *, key: str, fn: Any, **_: Any) -> bool:
        """Triton's hook before it compiles: whether it must not."""
        number = self.numbers.setdefault((fn.name, key), len(self.numbers))
        name = f"{fn.name} {number}"
        if not self._chosen(number) or name in self.errors:
            return True
        self._current = name
        return False

    def launch(self, run: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Compiles the kernel of a launch, if it is new and chosen."""
        self._current, began = "", time.monotonic()
        try:
            kernel = run(*args, **options | {"warmup": True})
            if kernel is not None:
                _build_launcher(kernel)
        except Exception as problem:  # the compiler raises many types
            if not self._current:
                raise
            line = (str(problem).splitlines() or [""])[0]
            self.errors[self._current] = f"{type(problem).__name__}: {line}"
        if self._current:
            self.seconds[self._current] = time.monotonic() - began


def _build_launcher(kernel: Any) -> None:
    """Compiles the C code that launches a kernel, which Triton before 3.7 has for each one. That
    takes the driver's library: a machine without a GPU has none."""
    nvidia: Any = import_module("triton.backends.nvidia.driver")
    if hasattr(nvidia, "make_launcher"):
        with contextlib.suppress(AssertionError, ImportError):
            nvidia.CudaLauncher(kernel.src, kernel.metadata)


@contextlib.contextmanager
def dry_run(card: Card, launches: Launches, where: torch.device = META) -> Iterator[DryDevice]:
    """Runs the code inside the context without a GPU. What it changes stays changed.

    Args:
        card: the GPU that is absent.
        launches: counts and compiles the kernels.
        where: the device of the tensors that would be on the GPU.
    """
    major, minor = card.capability
    cuda: Any = torch.cuda
    properties = SimpleNamespace(multi_processor_count=card.processors, major=major, minor=minor)
    cuda.get_device_capability = lambda device=None: card.capability
    cuda.get_device_properties = lambda device=None: properties
    weights: Any = loading
    weights.load_dummy_weights = lambda model, seed=0: None
    driver.set_active(_AbsentDriver(card))
    knobs.runtime.jit_cache_hook = launches.refuse
    # Triton writes all constants as JSON for its hook, which does not need it and fails with a
    # constant that is an object, as `Packing` is.
    triton_jit: Any = jit
    triton_jit.serialize_specialization_data = lambda *_: ""
    run = JITFunction.run

    def launch(self: Any, *args: Any, **options: Any) -> None:
        launches.launch(lambda *a, **o: run(self, *a, **o), *args, **options)

    JITFunction.run = launch
    with _Elsewhere(where):
        yield DryDevice(where)
