"""Atomic operations on words that threads or processes share, waiting in a loop, and the time."""

from __future__ import annotations

import platform
import time

from llvmlite import ir

from shmllm_kernels.cpu.language import as_value, compiled, emitted
from shmllm_kernels.cpu.simd import INT32, INT64, function

SPINS = 500
"""How often a waiting thread looks before it begins to yield its core to other threads: about
20 us."""


@emitted
def fetch_and_increment(builder, address):
    """Adds one to the int64 at an address, atomically; returns its value before that."""
    counter = builder.inttoptr(address, INT64.as_pointer())
    return builder.atomic_rmw("add", counter, ir.Constant(INT64, 1), "acq_rel")


@emitted
def load_acquire(builder, address):
    """Loads the int64 at an address with acquire ordering: the thread then also sees everything
    that was written before this int64."""
    return builder.load_atomic(builder.inttoptr(address, INT64.as_pointer()), "acquire", 8)


@emitted
def store_release(builder, address, value):
    """Stores an int64 at an address with release ordering: who loads it with acquire ordering also
    sees everything that this thread has written before."""
    place = builder.inttoptr(address, INT64.as_pointer())
    builder.store_atomic(as_value(value), place, "release", 8)


@emitted
def pause(builder):
    """Tells the core that this is a spin loop."""
    if platform.machine() == "x86_64":
        builder.call(function(builder, "llvm.x86.sse2.pause", ir.VoidType(), []), [])


@emitted
def yield_core(builder):
    """Lets another thread run on this core, if one wants to."""
    builder.call(function(builder, "sched_yield", INT32, []), [])


@emitted
def monotonic_ns(builder):
    """Returns the time on CLOCK_MONOTONIC in ns, which `time.perf_counter_ns` returns on Linux."""
    kind = ir.ArrayType(INT64, 2)
    with builder.goto_entry_block():
        place = builder.alloca(kind)
    get_time = function(builder, "clock_gettime", INT32, [INT32, kind.as_pointer()])
    builder.call(get_time, [ir.Constant(INT32, time.CLOCK_MONOTONIC), place])
    found = builder.load(place)
    seconds, rest = (builder.extract_value(found, index) for index in range(2))
    return builder.add(builder.mul(seconds, ir.Constant(INT64, 10**9)), rest)


@compiled
def wait_a_moment(spins):
    """Waits in a loop that has looked `spins` times, from 0: a moment, or, after SPINS times, until
    other threads have run on this core. Returns spins + 1."""
    if spins < SPINS:
        pause()
    else:
        yield_core()
    return spins + 1
