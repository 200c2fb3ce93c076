"""How packed weights are stored, as constants of the kernels: a kind is one row of `PACKINGS`.

    codes of 64 elements    bytes    where they lie
    8 bits                  64       in order
    2 bits                  16       byte i has the elements i, 16 + i, 32 + i and 48 + i, from its
                                     low bits on
    3 bits                  24       as 2 bits; then bit j of 64 is bit 2 of element j
    4 bits                  32       byte i has element i in its low bits, 32 + i in its high bits
    5 bits                  40       as 4 bits; then bit j of 64 is bit 4 of element j
    6 bits                  48       as 4 bits; then bits 2 * (j // 16) and after of byte j % 16 are
                                     bits 4 and 5 of element j

A row is padded to whole runs of 64 elements, but for "int8". The parameters of a run are first the
scales of its groups, then their offsets or zeros:

    stored as                      widened
    float16, bfloat16, float32     exactly
    row     1 float32 for a row    exactly
    e8m0    1 byte b               2 ** (b - 127); b = 0 is subnormal
    k       20 bytes for 4 runs    d * s0, d * s1, -(dmin * m0), -(dmin * m1) of each run
    k2      20 bytes for 4 runs    d * s of the 4 groups of each run, and then -(dmin * m)
    k6      18 bytes for 4 runs    d * s for each of the 16 groups
    k8      10 bytes for 4 runs    d * s for each of the 8 groups
    e4m3    8 bytes for 1 run      d * s for each of the 4 groups

A record "k" has d and dmin, float16, and for each run s0, s1, m0 and m1, uint8; "k2" has d, dmin
and a byte for each group, s in its low bits, m in its high bits; "k6" and "k8" have d and then s
for each group, int8; "e4m3" has d, float32, and s for each group in that format. `unpacking` has
the code that reads this; this module must not know kernels.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shmllm_kernels import code_tables

RUN = 64
"""The number of elements whose codes lie together."""


@dataclass(frozen=True, slots=True)
class Codes:
    """What the bits of a code stand for.

    Attributes:
        bits: the size of a code.
        shift: how far the exponent and mantissa of a code are from those of a float16; 0: codes
            are integers.
        unit: what that float16, or an entry of the table, is multiplied by, a power of two.
        table: the numbers of the codes from 0 and from 8 on, each an integer of 8 bytes, from its
            lowest byte on; empty: codes have no such table.
        floats: the numbers of 16 codes, if they are no integers of a byte in any unit.
    """

    bits: int
    shift: int = 0
    unit: float = 1.0
    table: tuple[int, int] | tuple[()] = ()
    floats: tuple[float, ...] = ()


def _of_table(bits: int, numbers: Sequence[float], unit: float = 1.0) -> Codes:
    """Codes that stand for the numbers of a table: integers of a byte in units."""
    own = [int(number / unit) for number in numbers]
    entries = struct.pack("16b", *own, *([0] * (16 - len(own))))
    low, high = struct.unpack("<2q", entries)
    return Codes(bits, unit=unit, table=(low, high))


TWO, THREE, NIBBLE, FIVE, SIX, BYTE = (Codes(bits) for bits in (2, 3, 4, 5, 6, 8))
E2M1, E4M3 = Codes(4, 9, 2.0**14), Codes(8, 7, 2.0**8)
NF4 = Codes(4, floats=code_tables.NF4)
IQ4 = _of_table(4, code_tables.IQ4)
IQ3_S = _of_table(4, code_tables.IQ3_S)
IQ3_XXS = _of_table(4, code_tables.IQ3_XXS, 2.0**-2)
IQ2 = _of_table(3, code_tables.IQ2, 2.0**-3)
IQ1 = _of_table(3, code_tables.IQ1, 2.0**-3)


@dataclass(frozen=True, slots=True)
class Packing:
    """How a kind stores rows.

    Attributes:
        codes: how numbers are stored.
        group: the number of elements that share parameters: 16 if they are stored as "k2", "k6" or
            "e4m3", else 32 or more.
        form: what a number q means: "scaled": (q - bias) * s; "offset": q * s + m; "zero":
            (q - z) * s. Each operation is rounded to float32 by itself.
        stored: how parameters are stored.
        bias: see `form`.
    """

    codes: Codes
    group: int
    form: str
    stored: str
    bias: int = 0

    @property
    def num_parameters(self) -> int:
        """The number of parameters of a run."""
        return RUN // self.group * (1 if self.form == "scaled" else 2)

    @property
    def is_paired(self) -> bool:
        """Whether kernels read two parameters at once: a GPU copies 4 bytes or more ahead of their
        use."""
        return self.stored in ("float16", "bfloat16") and self.num_parameters % 2 == 0

    @property
    def word(self) -> torch.dtype | None:
        """What kernels read parameters as; None: the dtype of their memory."""
        if self.is_paired or self.stored in ("k", "k2", "e4m3"):
            return torch.int32
        return torch.int16 if self.stored in ("k6", "k8") else None


PACKINGS = {
    "int8": Packing(BYTE, RUN, "scaled", "row"),
    "int4": Packing(NIBBLE, 32, "scaled", "float16", 8),
    "int4-g64": Packing(NIBBLE, 64, "scaled", "float16", 8),
    "q8_0": Packing(BYTE, 32, "scaled", "float16"),
    "q4_1": Packing(NIBBLE, 32, "offset", "float16"),
    "q5_0": Packing(FIVE, 32, "scaled", "float16", 16),
    "q5_1": Packing(FIVE, 32, "offset", "float16"),
    "q4_k": Packing(NIBBLE, 32, "offset", "k"),
    "q5_k": Packing(FIVE, 32, "offset", "k"),
    "q6_k": Packing(SIX, 16, "scaled", "k6", 32),
    "q2_k": Packing(TWO, 16, "offset", "k2"),
    "q3_k": Packing(THREE, 16, "scaled", "k6", 4),
    "ternary": Packing(TWO, 64, "scaled", "float16", 1),
    "ternary-f32": Packing(TWO, 64, "scaled", "float32", 1),
    "iq4_nl": Packing(IQ4, 32, "scaled", "float16"),
    "iq4_xs": Packing(IQ4, 32, "scaled", "k8"),
    "iq3_s": Packing(IQ3_S, 32, "scaled", "k8"),
    "iq3_xxs": Packing(IQ3_XXS, 32, "scaled", "k8"),
    "iq2": Packing(IQ2, 16, "scaled", "k6"),
    "iq1": Packing(IQ1, 16, "scaled", "k6"),
    "nf4": Packing(NF4, 64, "scaled", "float32"),
    "nvfp4": Packing(E2M1, 16, "scaled", "e4m3"),
    "mxfp4": Packing(E2M1, 32, "scaled", "e8m0"),
    "fp8": Packing(E4M3, 64, "scaled", "float32"),
    "w8-g64-f16": Packing(BYTE, 64, "scaled", "float16"),
    **{
        f"{name}-g{group}-{short}": Packing(codes, group, "scaled", dtype, bias)
        for name, codes, bias in (("w4", NIBBLE, 8), ("w8", BYTE, 0))
        for group in (32, 64)
        for short, dtype in (("bf16", "bfloat16"), ("f32", "float32"))
    },
    **{
        f"w4z-g{group}-{short}": Packing(NIBBLE, group, "zero", dtype)
        for group in (32, 64)
        for short, dtype in (("f16", "float16"), ("bf16", "bfloat16"), ("f32", "float32"))
    },
}
"""The packed formats by the name of the weights' kind."""


class PackedRows(NamedTuple):
    """The rows of a packed matrix, or of several.

    packing: how they are stored.
    codes: [..., rows, bytes] uint8 or int8, contiguous.
    parameters: [..., rows, words], contiguous.
    width: the number of elements of a row.
    """

    packing: Packing
    codes: Tensor
    parameters: Tensor
    width: int

    @classmethod
    def of(cls, kind: str, codes: Tensor, parameters: Tensor, width: int) -> PackedRows:
        """Returns the rows of a kind.

        Args:
            kind: a key of PACKINGS.
            codes: [..., rows, bytes].
            parameters: [..., rows, ...]; [..., rows] if a row has one.
            width: the number of elements of a row.
        """
        packing = PACKINGS[kind]
        if packing.stored == "row":
            parameters = parameters.unsqueeze(-1)
        if packing.word is not None:
            parameters = parameters.view(packing.word)
        return cls(packing, codes, parameters, width)

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., rows, elements]."""
        return (*self.codes.shape[:-1], self.width)


Rows = Tensor | PackedRows
"""Weights [..., rows, elements] of any kind."""
