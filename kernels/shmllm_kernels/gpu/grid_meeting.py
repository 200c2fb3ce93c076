"""Kernel functions of programs of one launch that wait for each other.

A program arrives when it has written what others read, and a meeting is over when so many have
arrived. Whoever waits must know that the others run: programs start in the order of their numbers,
and those of a cooperative launch run all at the same time.

The release of an arrival covers what all threads of its program have written before the barrier,
and the acquire of the thread that sees the last arrival, with the barrier behind it, makes all
threads of its program read that, and nothing older.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Meeting(NamedTuple):
    """What a program waits for.

    Attributes:
        counter: pointer to the int32 that counts arrivals.
        arrivals: how many there are when the meeting is over.
    """

    counter: Any
    arrivals: Any


@triton.jit
def arrive(counter):
    """Counts this program, whose results are written."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def await_arrivals(meeting):
    """Waits until a meeting is over; None: there is none."""
    if meeting is not None:
        while tl.atomic_add(meeting.counter, 0, sem="acquire", scope="gpu") < meeting.arrivals:
            pass
        tl.debug_barrier()


@triton.jit
def leave(counters, num_waiting):
    """Counts a program that waits no more, in the second of two counters. The last one sets both to
    0, which nobody reads any more, for the next launch."""
    if tl.atomic_add(counters + 1, 1, sem="relaxed", scope="gpu") == num_waiting - 1:
        tl.atomic_xchg(counters, 0, sem="relaxed", scope="gpu")
        tl.atomic_xchg(counters + 1, 0, sem="relaxed", scope="gpu")
