"""The numbers of packed matrices: runs of 64 elements of 4, 5, 6 or 8 bits.

4 bits    32 bytes: byte i has element i in its lower half, element 32 + i in its upper half
5 bits    as 4 bits; then 8 bytes, whose bit j is the highest bit of element j
6 bits    as 4 bits; then 16 bytes: byte i has the highest two bits of the elements i, 16 + i,
          32 + i and 48 + i, from its lowest bits on
8 bits    a byte for each element: signed, or a number of the format e4m3
e2m1      as 4 bits: a sign, two bits of exponent, one of mantissa
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

RUN = 64
"""The number of elements in a run."""
HALF = RUN // 2

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float32)
_E2M1_SIGNED = torch.cat([E2M1, -E2M1])


@dataclass(frozen=True, slots=True)
class Codes:
    """
    Attributes:
        run_bytes: the size of a run.
        numbers: memory [rows, runs * run_bytes] -> numbers [rows, elements] float32.
        store: (numbers [rows, elements] float32, memory) rounds the numbers into the memory.
        dtype: that of the memory.
    """

    run_bytes: int
    numbers: Callable[[Tensor], Tensor]
    store: Callable[[Tensor, Tensor], object]
    dtype: torch.dtype = torch.uint8


def _runs(memory: Tensor, run_bytes: int) -> Tensor:
    return memory.reshape(len(memory), -1, run_bytes)


def _nibbles(runs: Tensor) -> Tensor:
    """Returns the lowest four bits of all elements, [rows, runs, RUN] uint8."""
    low = runs[..., :HALF]
    return torch.cat([low & 15, low >> 4], 2)


def nibble_bytes(codes: Tensor) -> Tensor:
    """Returns the lowest four bits of elements [..., RUN] uint8 as bytes, [..., HALF]."""
    low = codes & 15
    return low[..., :HALF] | low[..., HALF:] << 4


def bits_of(words: Tensor) -> Tensor:
    """Returns the bits of bytes [..., n] as [..., 8 * n] uint8, from the lowest on."""
    return (words[..., None] >> _eight(words) & 1).flatten(-2)


def bytes_of(bits: Tensor) -> Tensor:
    """The reverse of `bits_of`."""
    placed: Tensor = bits.unflatten(-1, (-1, 8)) << _eight(bits)
    return placed.sum(-1, dtype=torch.uint8)


def _eight(bits: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=bits.device)


def _numbers_4(memory: Tensor) -> Tensor:
    return _nibbles(_runs(memory, HALF)).float().flatten(1)


def _numbers_5(memory: Tensor) -> Tensor:
    runs = _runs(memory, HALF + 8)
    return (_nibbles(runs) | bits_of(runs[..., HALF:]) << 4).float().flatten(1)


def _numbers_6(memory: Tensor) -> Tensor:
    runs = _runs(memory, HALF + 16)
    high = torch.cat([runs[..., HALF:] >> shift & 3 for shift in (0, 2, 4, 6)], 2)
    return (_nibbles(runs) | high << 4).float().flatten(1)


def _unsigned(numbers: Tensor, bits: int) -> Tensor:
    """Rounds to codes [rows, runs, RUN], halves upwards."""
    codes = (numbers + 0.5).clamp_(0, 2**bits - 1).to(torch.uint8)
    return codes.view(len(numbers), -1, RUN)


def _store_4(numbers: Tensor, memory: Tensor) -> None:
    memory.copy_(nibble_bytes(_unsigned(numbers, 4)).flatten(1))


def _store_5(numbers: Tensor, memory: Tensor) -> None:
    codes = _unsigned(numbers, 5)
    memory.copy_(torch.cat([nibble_bytes(codes), bytes_of(codes >> 4)], 2).flatten(1))


def _store_6(numbers: Tensor, memory: Tensor) -> None:
    codes = _unsigned(numbers, 6)
    quarters = (codes >> 4).unflatten(2, (4, 16)).unbind(2)
    high = quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6
    memory.copy_(torch.cat([nibble_bytes(codes), high], 2).flatten(1))


def _store_8(numbers: Tensor, memory: Tensor) -> None:
    # Halves go away from zero, as in GGUF's reference.
    memory.copy_((numbers.abs() + 0.5).floor_().copysign_(numbers).clamp_(-127, 127))


def _numbers_e2m1(memory: Tensor) -> Tensor:
    table = _E2M1_SIGNED.to(memory.device)
    return table[_nibbles(_runs(memory, HALF)).int()].flatten(1)


def _store_e2m1(numbers: Tensor, memory: Tensor) -> None:
    # Of two numbers that are equally near, the smaller one is taken.
    bounds = ((E2M1[1:] + E2M1[:-1]) / 2).to(numbers.device)
    codes = torch.bucketize(numbers.abs(), bounds).to(torch.uint8)
    codes |= (codes > 0).logical_and_(numbers < 0).to(torch.uint8) << 3  # no -0
    memory.copy_(nibble_bytes(codes.unflatten(1, (-1, RUN))).flatten(1))


def _numbers_e4m3(memory: Tensor) -> Tensor:
    return memory.contiguous().view(torch.float8_e4m3fn).float()


def _store_e4m3(numbers: Tensor, memory: Tensor) -> None:
    memory.copy_(numbers.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))


CODES = {
    "4": Codes(HALF, _numbers_4, _store_4),
    "5": Codes(HALF + 8, _numbers_5, _store_5),
    "6": Codes(HALF + 16, _numbers_6, _store_6),
    "8": Codes(RUN, lambda memory: memory.float(), _store_8, torch.int8),
    "e2m1": Codes(HALF, _numbers_e2m1, _store_e2m1),
    "e4m3": Codes(RUN, _numbers_e4m3, _store_e4m3),
}
