"""Asks the L2 cache for weights that later launches read, while a launch leaves memory at rest.

The attention of a few decodes waits for one round trip after another, and reads little. Meanwhile
the cache can get the weights of the products behind it: at 4.3 TB/s 21 MB in 5 us, of an L2 cache
of 50 MB. What is asked for changes no result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

ALIGNMENT = 16
"""Requests begin and end at multiples of so many bytes."""
REQUEST_BYTES = tl.constexpr(4096)
"""The bytes of a request, but for the last one."""
THREADS = tl.constexpr(128)
"""The requests of a program, 512 KiB, each of a thread; of 8 warps two threads make the same."""


class Memory(NamedTuple):
    """Memory as the kernel takes it.

    Attributes:
        first: pointer to the first element, at a multiple of ALIGNMENT.
        num_bytes: its bytes, likewise.
    """

    first: Any
    num_bytes: Any


@dataclass(frozen=True, slots=True)
class WeightsAhead:
    """The weights that a launch asks for, in the order in which they are read.

    Attributes:
        parts: three tensors, and how many bytes from the beginning of each: 0 for none.
    """

    parts: tuple[tuple[Tensor, int], ...]

    @classmethod
    def of(
        cls, most_bytes: int, output: Tensor, following: Tensor | None, is_gated: bool
    ) -> WeightsAhead:
        """Returns what attention asks for.

        Args:
            most_bytes: the most bytes of all parts.
            output: the projection behind attention.
            following: the matrix that is read next, of which they are what is left of
                `most_bytes`; None: nothing more.
            is_gated: whether its two halves are read side by side.
        """
        own = min(most_bytes, output.nbytes)
        parts = [(output, own), (output, 0), (output, 0)]
        if following is not None:
            halves = following.chunk(2) if is_gated else [following]
            each = (most_bytes - own) // len(halves)
            for place, half in enumerate(halves, start=1):
                parts[place] = half, min(each, half.nbytes)
        return cls(tuple((part, _whole(part, num_bytes)) for part, num_bytes in parts))

    def as_arguments(self) -> tuple[Memory, ...]:
        """Returns them as the kernel takes them."""
        return tuple(Memory(part, num_bytes) for part, num_bytes in self.parts)


def _whole(part: Tensor, num_bytes: int) -> int:
    """Returns how many bytes requests can be for: none of memory that begins at no multiple, or has
    gaps."""
    is_whole = part.is_contiguous() and part.data_ptr() % ALIGNMENT == 0
    return num_bytes // ALIGNMENT * ALIGNMENT if is_whole else 0


@triton.jit
def request(address, is_wanted, num_bytes):
    """Asks for `num_bytes` behind each address, of compute capability 9.0 on.

    Args:
        address: int64 addresses, multiples of 16.
        is_wanted: int32, 0 for addresses that are not asked for.
        num_bytes: int32, multiples of 16.
    """
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.b32 p, $2, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], $3;
        mov.u32 $0, 0;
        }""",
        "=r,l,r,r",
        [address, is_wanted, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def requests_of(ahead, program, num_programs):
    """Returns the addresses of a program's requests, and their bytes, 0 for none. The programs take
    the requests in turn.

    Args:
        ahead: some memory, a tuple of `Memory`.
        program, num_programs: the number of the program, and how many there are.
    """
    index = program + num_programs * tl.arange(0, THREADS)
    address = tl.zeros((THREADS,), tl.int64)
    size = tl.zeros((THREADS,), tl.int32)
    for part in tl.static_range(len(ahead)):
        memory = ahead[part]
        num_requests = tl.cdiv(memory.num_bytes, REQUEST_BYTES)
        begin = index * REQUEST_BYTES
        is_here = (index >= 0) & (index < num_requests)
        address = tl.where(is_here, memory.first.to(tl.int64) + begin, address)
        size = tl.where(is_here, tl.minimum(memory.num_bytes - begin, REQUEST_BYTES), size)
        index -= num_requests
    return address, size


@triton.jit
def ask_ahead(ahead):
    """Asks for this program's share of some memory; None: of nothing."""
    if ahead is not None:
        program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        num_programs = tl.num_programs(0) * tl.num_programs(1)
        address, size = requests_of(ahead, program, num_programs)
        request(address, size, size)
