"""A program of kernels, recorded once and played for every step by all compute threads.

Playing is one call into compiled code: no Python and no allocation between two kernels, and no
thread is woken or put to sleep. A kernel's work comes in pieces, which threads take as they come;
the next kernel begins when all pieces are *done*, not when all threads have come by: a thread that
the system holds up delays nobody, unless in the middle of a piece. Whatever
differs from step to step (how many rows there are, which tokens) lies in memory that kernels read
when they run. So a program serves batches of every size, and changed weights, without being
recorded anew, as long as all addresses stay.

The threads are those of torch's own OpenMP library, so that nothing competes with them. Must
not know what kernels compute.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from llvmlite import ir

from shmllm_kernels.cpu.language import Compiled, compiled, emitted
from shmllm_kernels.cpu.memory import word
from shmllm_kernels.cpu.objects import addresses_of
from shmllm_kernels.cpu.simd import INT32, INT64, function

_CALL = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)

SPINS = 500
"""How often a thread looks whether the others are done before it offers its core to others:
some 20 us."""

_ROW_WORDS = 16  # two cache lines, so that no two kernels' counters share one
_TAKEN, _DONE = 14, 15  # counters of pieces, behind the operands
MAX_OPERANDS = _TAKEN
_THREADS_SEEN = 4  # the word of a program that counts them


class Kernel:
    """Compiled code that does one piece of work at a time.

    Args:
        pieces: (operands, 0, 0, num_threads) -> how many pieces there are at the moment.
        run: (operands, piece, thread, num_threads, *known); does one of them. Any thread, in any
            order; `thread` counts from 0.
        known: what else `run` is told, when it is compiled.

    `operands` is the address of a row of int64 that `Tape.record` filled. Both functions are
    compiled, with what they call, when the kernel is first needed.
    """

    def __init__(self, pieces: Compiled, run: Compiled, *known: str | int) -> None:
        self._entries = (pieces, ()), (run, known)

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Of the compiled code, `pieces` and `run`."""
        return addresses_of(*self._entries)


@emitted
def _call(builder, address, first, second, third, fourth):
    """Call compiled code."""
    kind = ir.FunctionType(INT64, [INT64] * 4)
    arguments = [first, second, third, fourth]
    return builder.call(builder.inttoptr(address, kind.as_pointer()), arguments)


@emitted
def _add_one(builder, address):
    """Add one to the int64 at an address, atomically; returns what was there."""
    counter = builder.inttoptr(address, INT64.as_pointer())
    return builder.atomic_rmw("add", counter, ir.Constant(INT64, 1), "acq_rel")


@emitted
def _look(builder, address):
    """The int64 at an address, and all that was written before it was."""
    return builder.load_atomic(builder.inttoptr(address, INT64.as_pointer()), "acquire", 8)


@emitted
def _pause(builder):
    """Tell the core that this is a waiting loop."""
    if platform.machine() == "x86_64":
        builder.call(function(builder, "llvm.x86.sse2.pause", ir.VoidType(), []), [])


@emitted
def _yield_core(builder):
    builder.call(function(builder, "sched_yield", INT32, []), [])


@compiled
def _play(program):
    """What each thread runs. program: words as `Tape` lays them out."""
    num_kernels, rows, num_threads = word(program, 0), word(program, 1), word(program, 2)
    entries = word(program, 3)
    thread = _add_one(program + 8 * _THREADS_SEEN)
    for index in range(num_kernels):
        operands = rows + index * (8 * _ROW_WORDS)
        taken, done = operands + 8 * _TAKEN, operands + 8 * _DONE
        num_pieces = _call(word(entries, 2 * index), operands, 0, 0, num_threads)
        run = word(entries, 2 * index + 1)
        piece = _add_one(taken)
        while piece < num_pieces:
            _call(run, operands, piece, thread, num_threads)
            _add_one(done)
            piece = _add_one(taken)
        spins = 0
        while _look(done) < num_pieces:
            spins += 1
            if spins < SPINS:
                _pause()
            else:
                _yield_core()


@cache
def _player() -> int:
    return addresses_of((_play, ()))[0]


class _Threads:
    """torch's OpenMP library. `is_there` is false where torch brings another one: then one
    thread does everything."""

    def __init__(self) -> None:
        path = _loaded_library("libgomp")
        self.is_there = path is not None
        if path is None:
            return
        library = ctypes.CDLL(path)
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._parallel.restype = None

    def run(self, function: int, argument: int, num_threads: int) -> None:
        """Call a compiled function in that many threads."""
        self._parallel(function, argument, num_threads, 0)


def _loaded_library(name: str) -> str | None:
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if Path(path).name.startswith(name):
                return f"/{path}"
    return None


class KernelProgram:
    """
    Args:
        num_threads: that play it, where the number is not given.

    Attributes:
        labels: of the kernels, in order.
    """

    def __init__(self, num_threads: int) -> None:
        self.labels: list[str] = []
        self._entries: list[tuple[int, ...]] = []
        self._operands: list[Sequence[int]] = []
        self._kept: list[object] = []
        self._threads = _Threads()
        self.num_threads = num_threads if self._threads.is_there else 1
        self._player = _player()
        self._play_alone = _CALL(self._player)
        self._program = np.zeros(_THREADS_SEEN + 1, np.int64)
        self._table = self._rows = np.zeros((0, _ROW_WORDS), np.int64)

    def __len__(self) -> int:
        return len(self._entries)

    def record(
        self,
        kernel: Kernel,
        operands: Sequence[int],
        keep: Sequence[object] = (),
        label: str = "",
    ) -> None:
        """Append a kernel.

        Args:
            kernel: what to run.
            operands: up to MAX_OPERANDS addresses and numbers, as the kernel documents them.
            keep: what owns the memory behind the addresses, kept as long as the tape.
            label: what to call it where it is looked at.
        """
        self.labels.append(label)
        self._entries.append(kernel.addresses)
        self._operands.append(operands)
        self._kept.extend(keep)

    def _lay_out(self) -> None:
        self._table = np.array(self._entries, np.int64)
        self._rows = np.zeros((len(self._entries), _ROW_WORDS), np.int64)
        for row, operands in zip(self._rows, self._operands, strict=True):
            row[: len(operands)] = operands
        self._counters = self._rows[:, _TAKEN:]

    def replay(self, num_threads: int | None = None) -> None:
        """Run all kernels, in order."""
        self._play(0, len(self._entries), num_threads or self.num_threads)

    def play_one(self, index: int) -> None:
        """Run one kernel. All of them one after the other do what `replay` does, more slowly."""
        self._play(index, 1, self.num_threads)

    def _play(self, first: int, count: int, wanted: int) -> None:
        if len(self._rows) < len(self._entries):
            self._lay_out()
        self._counters.fill(0)
        rows = self._rows.ctypes.data + first * self._rows.strides[0]
        entries = self._table.ctypes.data + first * self._table.strides[0]
        self._program[:] = (count, rows, wanted, entries, 0)
        if wanted > 1:
            self._threads.run(self._player, self._program.ctypes.data, wanted)
        else:
            self._play_alone(self._program.ctypes.data)
