"""Kernels in which the ranks of a group meet: GPUs that compute parts of the same step.

Each rank has memory that the other ranks have mapped, all of one layout. A rank writes its part of
a sum there with an earlier launch. A meeting tells that to the others, and waits for them: each
program has a counter on its own device, which grows by one in each meeting, so that a replay of a
captured graph counts too. It writes the new number into a word that each other rank has for it, and
waits until its own words have that number or a larger one. A program waits for the program of the
same number only, so no launch depends on how many programs a device runs at a time.

What a rank reads after a meeting stays until the next meeting but one: whoever has left the next
one knows that all have read it. So sums use two buffers in turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_PROGRAMS = 128
"""The largest number of programs of a meeting; each has a word in the memory of each rank."""
WORD_BYTES = 8
PART_ALIGNMENT_BYTES = 16
BLOCK = 4096
"""The number of elements that a program adds at a time."""
NUM_WARPS = 16
SPINS = 1024
"""How often a program looks for another rank before it looks whether the group has ended. The
latter reads memory of the host, which takes about 1 us."""


def num_words(size: int) -> int:
    """Return the number of int64 words of a rank that the others write, for `size` ranks."""
    return size * MOST_PROGRAMS


@dataclass(frozen=True, slots=True)
class Peers:
    """The memory through which the ranks of a group meet.

    Attributes:
        rank: the number of this rank.
        size: the number of ranks.
        bases: [size] int64 on the device, the addresses of all ranks' memory, as this device maps
            it, each divisible by 16. `num_words` words, at first 0, lie at the beginning.
        counts: [MOST_PROGRAMS] int64 on the device, at first 0, the counters.
        ended: [1] int64 that the host writes and the device reads; not 0: the group has ended, and
            meetings wait no more. What they compute is undefined then.
    """

    rank: int
    size: int
    bases: Tensor
    counts: Tensor
    ended: Tensor


@triton.jit
def _arrive(bases_ptr, counts_ptr, rank, SIZE: tl.constexpr, PROGRAMS: tl.constexpr):
    """Tells all ranks that this one has come to the program's next meeting; returns its number."""
    program = tl.program_id(0)
    number = tl.atomic_add(counts_ptr + program, 1, sem="relaxed") + 1  # one thread, for all
    for other in tl.static_range(SIZE):
        words = tl.load(bases_ptr + other).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(words + rank * PROGRAMS + program, number, sem="release", scope="sys")
    return number


@triton.jit
def _await(
    bases_ptr,
    ended_ptr,
    rank,
    number,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SPINS: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Waits until all ranks have come to a meeting, or the group has ended.

    All threads must leave a loop in the same iteration, because its body has barriers. The value of
    an atomic operation is one thread's, which all get. Loads are each thread's own, so that the
    word of the host is reduced over as many elements as there are threads.
    """
    nowhere = tl.zeros((THREADS,), tl.int32)
    own = tl.load(bases_ptr + rank).to(tl.pointer_type(tl.int64)) + tl.program_id(0)
    for other in tl.static_range(SIZE):
        word = own + other * PROGRAMS
        spins = 0
        ended = tl.zeros((), tl.int64)
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        while (seen < number) & (ended == 0):
            seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
            spins += 1
            if spins % SPINS == 0:
                ended = tl.max(tl.load(ended_ptr + nowhere, volatile=True), axis=0)
    tl.debug_barrier()


@triton.jit
def _part(bases_ptr, other, offset, out_ptr):
    """Returns where a rank's part begins, `offset` bytes behind the beginning of its memory."""
    address = tl.load(bases_ptr + other) + offset
    return tl.multiple_of(address.to(tl.pointer_type(out_ptr.dtype.element_ty)), 16)


@triton.jit(do_not_specialize=["rank"])
def _sum_parts(
    out_ptr,
    bases_ptr,
    counts_ptr,
    ended_ptr,
    offset,
    count,
    rank,
    scale,
    ARRIVES: tl.constexpr,
    SUMS: tl.constexpr,
    ADDS: tl.constexpr,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SPINS: tl.constexpr,
    THREADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if ARRIVES:
        number = _arrive(bases_ptr, counts_ptr, rank, SIZE, PROGRAMS)
    else:
        number = tl.load(counts_ptr + tl.program_id(0))
    if SUMS:
        _await(bases_ptr, ended_ptr, rank, number, SIZE, PROGRAMS, SPINS, THREADS)
        dtype = out_ptr.dtype.element_ty
        added: tl.constexpr = tl.int64 if dtype.is_int() else tl.float32
        for begin in tl.range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
            at = begin + tl.arange(0, BLOCK)
            inside = at < count
            first = _part(bases_ptr, 0, offset, out_ptr)
            total = tl.load(first + at, mask=inside, other=0).to(added)
            for other in tl.static_range(1, SIZE):
                part = _part(bases_ptr, other, offset, out_ptr)
                total += tl.load(part + at, mask=inside, other=0).to(added)
            if ADDS:
                before = tl.load(out_ptr + at, mask=inside, other=0).to(added)
                total = total.to(dtype).to(added) * scale + before
            tl.store(out_ptr + at, total.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["rank"])
def _meet(
    bases_ptr,
    counts_ptr,
    ended_ptr,
    rank,
    WAITS: tl.constexpr,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SPINS: tl.constexpr,
    THREADS: tl.constexpr,
):
    number = _arrive(bases_ptr, counts_ptr, rank, SIZE, PROGRAMS)
    if WAITS:
        _await(bases_ptr, ended_ptr, rank, number, SIZE, PROGRAMS, SPINS, THREADS)


def sum_parts(
    out: Tensor,
    offset: int,
    peers: Peers,
    *,
    most_elements: int | None = None,
    arrives: bool = True,
    sums: bool = True,
    adds: bool = False,
    scale: float = 1.0,
) -> None:
    """Writes ``reference.group.sum_parts`` of all ranks' parts to ``out``, on each rank, after all
    ranks have launched it. All ranks must launch the same meetings in the same order.

    Args:
        out: [rows, width], contiguous, 16-byte aligned: float32, float16, bfloat16 or int64. It
            may be this rank's own part, if no other rank reads that, and must not overlap other
            memory that the ranks share.
        offset: where the parts begin in the memory of each rank, in bytes, divisible by 16. Each
            part has the shape and the dtype of ``out``.
        peers: the memory of the ranks.
        most_elements: the number of elements of the largest ``out`` of a rank, if the ranks add
            parts of several sizes: programs wait for those of the same number, so all ranks launch
            as many, and those behind the end of a smaller part only meet. None: all are equal.
        arrives: whether the launch tells the others that this rank's part is there. Two launches,
            one that arrives and one that sums, are as one that does both.
        sums: whether the launch waits for the others and adds the parts.
        adds: whether ``scale`` times the sum, rounded, is added to ``out``, of floats.
        scale: the factor of the sum then.

    Each rank reads ``size * rows * width`` elements, all but its own over the link to the others,
    and writes ``rows * width``. At 8 KiB a part, one row of 4,096, that is two crossings of the
    link, one for the word and one for the part: 4 us. 2 launches a layer.
    """
    assert out.is_contiguous(), "out must be contiguous"
    assert offset % PART_ALIGNMENT_BYTES == 0, "parts begin at aligned addresses"
    most = out.numel() if most_elements is None else most_elements
    assert out.numel() <= most, "no part is larger than the largest one"
    programs = min(triton.cdiv(most, BLOCK), MOST_PROGRAMS)
    if programs == 0:
        return
    _sum_parts[(programs,)](
        out,
        peers.bases,
        peers.counts,
        peers.ended,
        offset,
        out.numel(),
        peers.rank,
        scale,
        ARRIVES=arrives,
        SUMS=sums,
        ADDS=adds,
        SIZE=peers.size,
        PROGRAMS=MOST_PROGRAMS,
        SPINS=SPINS,
        THREADS=32 * NUM_WARPS,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


def meet(peers: Peers, waits: bool) -> None:
    """Tells all ranks that what this one has written before is there; with ``waits``, also waits
    until all ranks have done so. One launch of one program, a store and a load over the link for
    each rank: 5 us."""
    _meet[(1,)](
        peers.bases,
        peers.counts,
        peers.ended,
        peers.rank,
        WAITS=waits,
        SIZE=peers.size,
        PROGRAMS=MOST_PROGRAMS,
        SPINS=SPINS,
        THREADS=32,
        num_warps=1,
    )


def make_counts(device: torch.device) -> Tensor:
    """Return the counters of a rank that has met nobody."""
    return torch.zeros(MOST_PROGRAMS, dtype=torch.int64, device=device)
