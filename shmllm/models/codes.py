"""The numbers of packed matrices: runs of 64 elements of 2 to 6 or 8 bits.

2 bits    16 bytes: byte i has the elements i, 16 + i, 32 + i and 48 + i, from its lowest bits on
3 bits    as 2 bits; then 8 bytes, whose bit j is the highest bit of element j
4 bits    32 bytes: byte i has element i in its lower half, element 32 + i in its upper half
5 bits    as 4 bits; then 8 bytes, as of 3 bits
6 bits    as 4 bits; then 16 bytes of the highest two bits, as of 2 bits
8 bits    a byte for each element: signed, or a number of the format e4m3

A code of few bits is the number itself, or stands for one of a table:

e2m1      4 bits: a sign, two bits of exponent, one of mantissa
iq3_s     4 bits: a sign, and which of 8 magnitudes; iq3_xxs likewise
iq2       3 bits: a sign, and which of 3 magnitudes; iq1 likewise
iq4       4 bits: which of 16 numbers; nf4 likewise
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shmllm_kernels import code_tables

RUN = 64
"""The number of elements in a run."""
HALF = RUN // 2


@dataclass(frozen=True, slots=True)
class Codes:
    """
    Attributes:
        run_bytes: the size of a run.
        numbers: memory [rows, runs * run_bytes] -> numbers [rows, elements] float32.
        store: (numbers [rows, elements] float32, memory) rounds the numbers into the memory.
        dtype: that of the memory.
        nearest: numbers -> the nearest ones of a table.
    """

    run_bytes: int
    numbers: Callable[[Tensor], Tensor]
    store: Callable[[Tensor, Tensor], object]
    dtype: torch.dtype = torch.uint8
    nearest: Callable[[Tensor], Tensor] | None = None


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


def _quarters(memory: Tensor) -> Tensor:
    """Returns two bits of all elements, [rows, runs, RUN] uint8, of a quarter as many bytes."""
    return torch.cat([memory >> shift & 3 for shift in (0, 2, 4, 6)], 2)


def quarter_bytes(codes: Tensor) -> Tensor:
    """Returns the lowest two bits of elements [..., RUN] uint8 as bytes, [..., RUN / 4]."""
    parts = codes.unflatten(-1, (4, HALF // 2)).unbind(-2)
    joined: Tensor = parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6
    return joined


@dataclass(frozen=True, slots=True)
class _Bits:
    """How codes of so many bits are stored.

    Attributes:
        run_bytes: the size of a run.
        read: runs [rows, runs, run_bytes] -> codes [rows, runs, RUN] uint8.
        write: codes -> runs.
    """

    run_bytes: int
    read: Callable[[Tensor], Tensor]
    write: Callable[[Tensor], Tensor]


def _with_highest_bit(bits: int) -> _Bits:
    """Codes of `bits` bits and one more."""
    low = _BITS[bits]
    return _Bits(
        low.run_bytes + RUN // 8,
        lambda runs: (
            low.read(runs[..., : low.run_bytes]) | bits_of(runs[..., low.run_bytes :]) << bits
        ),
        lambda codes: torch.cat([low.write(codes & (1 << bits) - 1), bytes_of(codes >> bits)], 2),
    )


_BITS = {
    2: _Bits(HALF // 2, _quarters, quarter_bytes),
    4: _Bits(HALF, _nibbles, nibble_bytes),
    6: _Bits(
        HALF + HALF // 2,
        lambda runs: _nibbles(runs) | _quarters(runs[..., HALF:]) << 4,
        lambda codes: torch.cat([nibble_bytes(codes), quarter_bytes(codes >> 4)], 2),
    ),
}
_BITS |= {bits + 1: _with_highest_bit(bits) for bits in (2, 4)}


def _codes(bits: int, memory: Tensor) -> Tensor:
    """Returns the codes of rows, [rows, elements] uint8."""
    own = _BITS[bits]
    return own.read(_runs(memory, own.run_bytes)).flatten(1)


def _pack(bits: int, codes: Tensor) -> Tensor:
    return _BITS[bits].write(codes.view(len(codes), -1, RUN)).flatten(1)


def _integers(bits: int) -> Codes:
    """Codes that are the numbers from 0 on; halves are rounded upwards."""

    def store(numbers: Tensor, memory: Tensor) -> None:
        codes = (numbers + 0.5).clamp_(0, 2**bits - 1).to(torch.uint8)
        memory.copy_(_pack(bits, codes))

    return Codes(
        _BITS[bits].run_bytes, lambda memory: _codes(bits, memory).float(), store,
    )  # fmt: skip


def _of_table(bits: int, table: Tensor, code: Callable[[Tensor], Tensor]) -> Codes:
    """Codes that stand for the numbers of a table. code: numbers -> the codes of the nearest."""

    def look_up(codes: Tensor) -> Tensor:
        return table.to(codes.device)[codes.int()]

    return Codes(
        _BITS[bits].run_bytes,
        lambda memory: look_up(_codes(bits, memory)),
        lambda numbers, memory: memory.copy_(_pack(bits, code(numbers))),
        nearest=lambda numbers: look_up(code(numbers)),
    )


def _nearest(numbers: Tensor, ascending: Tensor) -> Tensor:
    """Returns the places of the nearest numbers; of two that are equally near, the first."""
    bounds = ((ascending[1:] + ascending[:-1]) / 2).to(numbers.device)
    return torch.bucketize(numbers.contiguous(), bounds).to(torch.uint8)


def _signed(numbers: Sequence[float]) -> Codes:
    """Codes of a sign, the highest bit, and the place of a magnitude."""
    table, bits = torch.tensor(numbers), (len(numbers) - 1).bit_length()
    magnitudes = table[: len(table) // 2]
    first = 1 if numbers[0] == 0 else 0  # there is no -0

    def code(numbers: Tensor) -> Tensor:
        places = _nearest(numbers.abs(), magnitudes)
        is_negative = (places >= first).logical_and_(numbers < 0)
        return places | is_negative.to(torch.uint8) << (bits - 1)

    return _of_table(bits, table, code)


def _ascending(numbers: Sequence[float]) -> Codes:
    table = torch.tensor(numbers)
    return _of_table((len(table) - 1).bit_length(), table, lambda numbers: _nearest(numbers, table))


def _store_8(numbers: Tensor, memory: Tensor) -> None:
    # Halves go away from zero, as in GGUF's reference.
    memory.copy_((numbers.abs() + 0.5).floor_().copysign_(numbers).clamp_(-127, 127))


def _numbers_e4m3(memory: Tensor) -> Tensor:
    return memory.contiguous().view(torch.float8_e4m3fn).float()


def _store_e4m3(numbers: Tensor, memory: Tensor) -> None:
    memory.copy_(numbers.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))


CODES = {
    **{str(bits): _integers(bits) for bits in _BITS},
    "8": Codes(RUN, lambda memory: memory.float(), _store_8, torch.int8),
    "e4m3": Codes(RUN, _numbers_e4m3, _store_e4m3),
    "e2m1": _signed(code_tables.E2M1),
    "iq3_s": _signed(code_tables.IQ3_S),
    "iq3_xxs": _signed(code_tables.IQ3_XXS),
    "iq2": _signed(code_tables.IQ2),
    "iq1": _signed(code_tables.IQ1),
    "iq4": _ascending(code_tables.IQ4),
    "nf4": _ascending(code_tables.NF4),
}
