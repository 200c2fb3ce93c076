"""A program of kernels, recorded once and replayed in every step by all compute threads.

A replay is one call into compiled code: between two kernels no Python runs, nothing is allocated,
and no thread is woken or put to sleep. A kernel's work is divided into pieces, which threads take
from an atomic counter. The next kernel begins when all pieces are done, not when all threads have
arrived: a thread that the operating system has preempted delays the others only if it holds a
piece. Everything that differs between steps (the number of rows, the tokens) is in memory that
kernels read when they run. So one program serves batches of every size and changed weights, as
long as all addresses stay the same.

The threads are those of torch's own OpenMP library, so that no second pool of threads competes for
the cores. This module must not know what kernels compute.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, cached_property

import numpy as np
from llvmlite import ir

from shmllm_kernels.cpu.atomics import (
    fetch_and_increment,
    load_acquire,
    wait_a_moment,
)
from shmllm_kernels.cpu.language import Compiled, compiled, emitted
from shmllm_kernels.cpu.memory import word
from shmllm_kernels.cpu.object_code import addresses_of
from shmllm_kernels.cpu.simd import INT64

Observe = Callable[[str], AbstractContextManager[object]]
_FUNCTION_TYPE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)

_ROW_WORDS = 24  # three cache lines, so that the counters of two kernels never share one
_TAKEN, _DONE = 22, 23  # the counters of pieces, after the operands
MAX_OPERANDS = _TAKEN
_STARTED_THREADS = 4  # the word of a program that counts the threads that have started


class Kernel:
    """Two compiled functions: one counts the pieces of work, the other does one piece.

    Args:
        pieces: (operands, 0, 0, num_threads) -> the number of pieces in this step. A thread that
            was preempted may call it when others already run later kernels. So it may read what
            earlier kernels wrote, but no later kernel of the program may write that again: the
            thread would take pieces that do not exist, or wait for them for ever.
        run: (operands, piece, thread, num_threads, *constants); does one piece. Any thread may do
            any piece, in any order; `thread` counts from 0.
        constants: the last arguments of `run`, known when it is compiled.

    `operands` is the address of a row of int64 that `KernelProgram.record` filled. Both functions
    are compiled, with the functions that they call, when the kernel is first used.
    """

    def __init__(self, pieces: Compiled, run: Compiled, *constants: str | int) -> None:
        self._entries = (pieces, ()), (run, constants)

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """The addresses of the compiled functions `pieces` and `run`."""
        return addresses_of(*self._entries)


@emitted
def _call(builder, address, first, second, third, fourth):
    """Calls the compiled function at an address."""
    kind = ir.FunctionType(INT64, [INT64] * 4)
    arguments = [first, second, third, fourth]
    return builder.call(builder.inttoptr(address, kind.as_pointer()), arguments)


@compiled
def _run_kernels(program):
    """Runs all kernels; each thread calls it once. program: the words that
    `KernelProgram._run` writes."""
    num_kernels, rows, num_threads = word(program, 0), word(program, 1), word(program, 2)
    entries = word(program, 3)
    thread = fetch_and_increment(program + 8 * _STARTED_THREADS)
    for index in range(num_kernels):
        operands = rows + index * (8 * _ROW_WORDS)
        taken, done = operands + 8 * _TAKEN, operands + 8 * _DONE
        num_pieces = _call(word(entries, 2 * index), operands, 0, 0, num_threads)
        run = word(entries, 2 * index + 1)
        piece = fetch_and_increment(taken)
        while piece < num_pieces:
            _call(run, operands, piece, thread, num_threads)
            fetch_and_increment(done)
            piece = fetch_and_increment(taken)
        spins = 0
        while load_acquire(done) < num_pieces:
            spins = wait_a_moment(spins)


@cache
def _program_entry() -> int:
    return addresses_of((_run_kernels, ()))[0]


class _Threads:
    """torch's OpenMP library, libgomp. `is_available` is false if torch uses another library: then
    one thread runs all kernels."""

    def __init__(self) -> None:
        path = _loaded_library("libgomp")
        self.is_available = path is not None
        if path is None:
            return
        library = ctypes.CDLL(path)
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._parallel.restype = None

    def run(self, function: int, argument: int, num_threads: int) -> None:
        """Calls a compiled function in `num_threads` threads."""
        self._parallel(function, argument, num_threads, 0)


def _loaded_library(name: str) -> str | None:
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if path.rpartition("/")[2].startswith(name):
                return f"/{path}"
    return None


@cache
def _threads() -> _Threads:
    """The library that torch has loaded, which stays the same."""
    return _Threads()


class KernelProgram:
    """A sequence of kernels with their operands.

    Args:
        num_threads: the number of threads of a replay.

    Attributes:
        labels: the kernels' labels, in order.
        num_threads: as given, or 1 if torch uses another library than libgomp. It can be changed.
    """

    def __init__(self, num_threads: int) -> None:
        self.labels: list[str] = []
        self._entries: list[tuple[int, ...]] = []
        self._operands: list[Sequence[int]] = []
        self._last: Kernel | None = None
        self._kept: list[object] = []
        self._threads = _threads()
        self.num_threads = num_threads if self._threads.is_available else 1
        self._entry = _program_entry()
        self._run_alone = _FUNCTION_TYPE(self._entry)
        self._program = np.zeros(_STARTED_THREADS + 1, np.int64)
        self._lay_out()

    def __len__(self) -> int:
        return len(self._entries)

    def record(
        self,
        kernel: Kernel,
        operands: Sequence[int],
        keep: Sequence[object] = (),
        label: str = "",
    ) -> None:
        """Appends a kernel.

        Args:
            kernel: the kernel.
            operands: up to MAX_OPERANDS addresses and numbers, as the kernel documents them.
            keep: objects that own the memory at these addresses; the program keeps them alive.
            label: the kernel's name in profiles.
        """
        assert len(operands) <= MAX_OPERANDS, "the counters of pieces lie behind them"
        self._last = kernel
        self.labels.append(label)
        self._entries.append(kernel.addresses)
        self._operands.append(operands)
        self._kept.extend(keep)

    @property
    def last(self) -> tuple[Kernel, Sequence[int]] | None:
        """The kernel that was recorded last, and its operands; None: there is none."""
        return None if self._last is None else (self._last, self._operands[-1])

    def replace_last(self, kernel: Kernel, operands: Sequence[int]) -> None:
        """Records a kernel in place of the last one, before the program runs."""
        assert self._last is not None
        assert len(self._rows) < len(self._entries)
        self._entries[-1], self._operands[-1], self._last = kernel.addresses, operands, kernel

    def _lay_out(self) -> None:
        self._table = np.array(self._entries, np.int64).reshape(-1, 2)
        self._rows = np.zeros((len(self._entries), _ROW_WORDS), np.int64)
        for row, operands in zip(self._rows, self._operands, strict=True):
            row[: len(operands)] = operands
        self._counters = self._rows[:, _TAKEN:]

    def replay(self, kernels: range | None = None, observe: Observe | None = None) -> None:
        """Runs kernels, in order.

        Args:
            kernels: the consecutive kernels to run; None: all.
            observe: makes the context manager inside which each kernel runs, from its label. That
                computes the same, slower: the kernels run one by one. None: nobody looks.
        """
        kernels = range(len(self)) if kernels is None else kernels
        if observe is None:
            self._run(kernels.start, len(kernels))
            return
        for index in kernels:
            with observe(self.labels[index]):
                self._run(index, 1)

    def _run(self, first: int, count: int) -> None:
        if len(self._rows) < len(self._entries):
            self._lay_out()
        self._counters.fill(0)
        rows = self._rows.ctypes.data + first * self._rows.strides[0]
        entries = self._table.ctypes.data + first * self._table.strides[0]
        self._program[:] = (count, rows, self.num_threads, entries, 0)
        if self.num_threads > 1:
            self._threads.run(self._entry, self._program.ctypes.data, self.num_threads)
        else:
            self._run_alone(self._program.ctypes.data)
