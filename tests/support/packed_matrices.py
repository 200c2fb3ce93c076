"""Random packed matrices and their values, decoded by torch from the layout that `unpacking`,
`codes` and `parameters` document."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from support.cpu_kernels import guarded
from torch import Tensor

RUN = 64


class Layout(NamedTuple):
    """codes: the name of the codes. group: the elements that share parameters. form: how a number
    becomes a value. stored: how parameters are stored. bias: what is subtracted from codes."""

    codes: str
    group: int
    form: str
    stored: str
    bias: int = 0


LAYOUTS = {
    "int4": Layout("4", 32, "scaled", "float16", 8),
    "int4-g64": Layout("4", 64, "scaled", "float16", 8),
    "q8_0": Layout("8", 32, "scaled", "float16"),
    "q4_1": Layout("4", 32, "offset", "float16"),
    "q5_0": Layout("5", 32, "scaled", "float16", 16),
    "q5_1": Layout("5", 32, "offset", "float16"),
    "q4_k": Layout("4", 32, "offset", "k"),
    "q5_k": Layout("5", 32, "offset", "k"),
    "q6_k": Layout("6", 16, "scaled", "k6", 32),
    "q2_k": Layout("2", 16, "offset", "k2"),
    "q3_k": Layout("3", 16, "scaled", "k6", 4),
    "ternary": Layout("2", 64, "scaled", "float16", 1),
    "ternary-f32": Layout("2", 64, "scaled", "float32", 1),
    "iq4_nl": Layout("iq4", 32, "scaled", "float16"),
    "iq4_xs": Layout("iq4", 32, "scaled", "k8"),
    "iq3_s": Layout("iq3_s", 32, "scaled", "k8"),
    "iq3_xxs": Layout("iq3_xxs", 32, "scaled", "k8"),
    "iq2": Layout("iq2", 16, "scaled", "k6"),
    "iq1": Layout("iq1", 16, "scaled", "k6"),
    "nf4": Layout("nf4", 64, "scaled", "float32"),
    "nvfp4": Layout("e2m1", 16, "scaled", "e4m3"),
    "mxfp4": Layout("e2m1", 32, "scaled", "e8m0"),
    "fp8": Layout("e4m3", 64, "scaled", "float32"),
    "w4-g32-bf16": Layout("4", 32, "scaled", "bfloat16", 8),
    "w4-g64-bf16": Layout("4", 64, "scaled", "bfloat16", 8),
    "w4-g32-f32": Layout("4", 32, "scaled", "float32", 8),
    "w4-g64-f32": Layout("4", 64, "scaled", "float32", 8),
    "w4z-g32-f16": Layout("4", 32, "zero", "float16"),
    "w4z-g64-f16": Layout("4", 64, "zero", "float16"),
    "w4z-g32-bf16": Layout("4", 32, "zero", "bfloat16"),
    "w4z-g64-bf16": Layout("4", 64, "zero", "bfloat16"),
    "w4z-g32-f32": Layout("4", 32, "zero", "float32"),
    "w4z-g64-f32": Layout("4", 64, "zero", "float32"),
    "w8-g64-f16": Layout("8", 64, "scaled", "float16"),
    "w8-g32-bf16": Layout("8", 32, "scaled", "bfloat16"),
    "w8-g64-bf16": Layout("8", 64, "scaled", "bfloat16"),
    "w8-g32-f32": Layout("8", 32, "scaled", "float32"),
    "w8-g64-f32": Layout("8", 64, "scaled", "float32"),
}
"""The kinds whose rows are padded to whole runs; "int8" has a scale for each row instead."""
USUAL = (
    *("q8_0", "q5_1", "q4_k", "q6_k", "mxfp4", "fp8", "w4z-g32-bf16"),
    *("q2_k", "iq4_xs", "iq2", "nf4", "nvfp4"),
)
"""Kinds that together have all codes, all forms and all parameters."""
_TABLES = {
    "e2m1": (0, 0.5, 1, 1.5, 2, 3, 4, 6),
    "iq3_s": (1, 3, 5, 7, 9, 11, 13, 15),
    "iq3_xxs": (1, 3, 5, 7, 9, 11, 13, 15.5),
    "iq2": (1, 25 / 8, 43 / 8, 43 / 8),
    "iq1": (1 / 8, 7 / 8, 9 / 8, 9 / 8),
}
"""Magnitudes, of codes with a sign above them."""
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
RUN_BYTES = {
    **{"2": 16, "3": 24, "4": 32, "5": 40, "6": 48, "8": 64, "e4m3": 64},
    **{"iq4": 32, "nf4": 32, "iq2": 24, "iq1": 24, "e2m1": 32, "iq3_s": 32, "iq3_xxs": 32},
}
RECORD_BYTES = {"k": 20, "k2": 20, "k6": 18, "k8": 10}
"""The bytes of the parameters of 256 elements."""


class PackedMatrix(NamedTuple):
    """integers, scales: uint8 [rows, bytes], of which nothing may be read behind the last row."""

    kind: str
    k: int
    integers: Tensor
    scales: Tensor


def depth_step(kind: str) -> int:
    """Returns the number of elements that rows have a multiple of."""
    return 256 if kind in LAYOUTS and LAYOUTS[kind].stored in RECORD_BYTES else 1


def _nibbles(runs: Tensor) -> Tensor:
    return torch.cat([runs[..., :32] & 15, runs[..., :32] >> 4], -1).long()


def _five_bits(runs: Tensor) -> Tensor:
    high = runs[..., 32:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return _nibbles(runs) + 16 * high.flatten(-2).long()


def _six_bits(runs: Tensor) -> Tensor:
    high = [runs[..., 32:] >> shift & 3 for shift in (0, 2, 4, 6)]
    return _nibbles(runs) + 16 * torch.cat(high, -1).long()


def _two_bits(runs: Tensor) -> Tensor:
    return torch.cat([runs[..., :16] >> shift & 3 for shift in (0, 2, 4, 6)], -1).long()


def _three_bits(runs: Tensor) -> Tensor:
    high = runs[..., 16:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return _two_bits(runs) + 4 * high.flatten(-2).long()


def _looked_up(name: str) -> Callable[[Tensor], Tensor]:
    magnitudes = torch.tensor(_TABLES[name])
    codes = _nibbles if len(magnitudes) == 8 else _three_bits
    return lambda runs: torch.cat([magnitudes, -magnitudes])[codes(runs)]


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "2": _two_bits,
    "3": _three_bits,
    "4": _nibbles,
    "5": _five_bits,
    "6": _six_bits,
    "8": lambda runs: runs.view(torch.int8),
    "e4m3": lambda runs: runs.view(torch.float8_e4m3fn),
    "iq4": lambda runs: torch.tensor(_IQ4)[_nibbles(runs)],
    "nf4": lambda runs: torch.tensor(_NF4)[_nibbles(runs)],
    **{name: _looked_up(name) for name in _TABLES},
}


def _of_k(records: Tensor) -> Tensor:
    halves = records[..., :4].contiguous().view(torch.float16).float()
    d, dmin = halves[..., :1, None], halves[..., 1:, None]
    pairs = records[..., 4:].float().reshape(*records.shape[:-1], 4, 2, 2)
    scales, minima = pairs[..., 0, :], pairs[..., 1, :]
    return torch.stack([d * scales, -(dmin * minima)], -2).flatten(-3)


def _of_k2(records: Tensor) -> Tensor:
    d, dmin = records[..., :4].contiguous().view(torch.float16).float().split(1, -1)
    factors = records[..., 4:].unflatten(-1, (4, 4))
    scales, minima = (factors & 15).float(), (factors >> 4).float()
    return torch.cat([d[..., None] * scales, -(dmin[..., None] * minima)], -1).flatten(-2)


def _of_factors(records: Tensor) -> Tensor:
    d = records[..., :2].contiguous().view(torch.float16).float()
    return d * records[..., 2:].view(torch.int8).float()


def _parameters(scales: Tensor, stored: str) -> Tensor:
    """Returns all parameters of each row, float32."""
    if stored in RECORD_BYTES:
        records = scales.reshape(len(scales), -1, RECORD_BYTES[stored])
        return {"k": _of_k, "k2": _of_k2}.get(stored, _of_factors)(records).flatten(1)
    if stored == "e4m3":
        runs = scales.reshape(len(scales), -1, 8)
        own = runs[..., :4].contiguous().view(torch.float32)
        return (own * runs[..., 4:].contiguous().view(torch.float8_e4m3fn).float()).flatten(1)
    if stored == "e8m0":
        return torch.exp2(scales.double() - 127).float()
    return scales.contiguous().view(getattr(torch, stored)).float()


def values_of(matrix: PackedMatrix) -> Tensor:
    """Returns a matrix's values, float32, computed one operation at a time."""
    if matrix.kind == "int8":
        factors = matrix.scales.contiguous().view(torch.float32)
        return matrix.integers.view(torch.int8).float() * factors
    layout = LAYOUTS[matrix.kind]
    runs = matrix.integers.reshape(len(matrix.integers), -1, RUN_BYTES[layout.codes])
    numbers = NUMBERS[layout.codes](runs).float() - layout.bias
    groups = numbers.view(*runs.shape[:2], -1, layout.group)
    own = _parameters(matrix.scales, layout.stored).view(*runs.shape[:2], -1)
    count = RUN // layout.group
    first, second = own[..., :count, None], own[..., count:, None]
    if layout.form == "scaled":
        values = groups * first
    else:
        values = groups * first + second if layout.form == "offset" else (groups - second) * first
    return values.flatten(1)[:, : matrix.k]


def _bytes_of(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8)


def _random_parameters(rows: int, num_runs: int, layout: Layout) -> Tensor:
    count = num_runs * (RUN // layout.group) * (1 if layout.form == "scaled" else 2)
    if layout.stored in RECORD_BYTES:
        size, num_halves = RECORD_BYTES[layout.stored], 2 if layout.form == "offset" else 1
        records = torch.randint(0, 256, (rows, num_runs // 4, size)).to(torch.uint8)
        halves = torch.randn(rows, num_runs // 4, num_halves) / 64
        records[..., : 2 * num_halves] = _bytes_of(halves.half())
        return records.flatten(1)
    if layout.stored == "e4m3":
        runs = torch.randint(0, 127, (rows, num_runs, 8)).to(torch.uint8)
        runs[..., :4] = _bytes_of(torch.randn(rows, num_runs, 1) / 64)
        return runs.flatten(1)
    if layout.stored == "e8m0":
        return torch.randint(120, 132, (rows, count)).to(torch.uint8)
    own = torch.randn(rows, num_runs, count // num_runs)
    if layout.form == "zero":
        own[..., RUN // layout.group :] = torch.randint(
            0, 16, (rows, num_runs, RUN // layout.group)
        )
    return _bytes_of(own.flatten(1).to(getattr(torch, layout.stored)))


def _moved(numbers: Tensor) -> Tensor:
    """Copies to memory that ends where nothing may be read."""
    return guarded(numbers.nbytes).view(numbers.shape).copy_(numbers)


def drawn_matrix(rows: int, k: int, kind: str) -> PackedMatrix:
    """Returns a matrix of random codes, all finite, and parameters."""
    if kind == "int8":
        integers = torch.randint(0, 256, (rows, k)).to(torch.uint8)
        return PackedMatrix(kind, k, _moved(integers), _moved(_bytes_of(torch.rand(rows, 1))))
    layout, num_runs = LAYOUTS[kind], -(-k // RUN)
    integers = torch.randint(0, 256, (rows, num_runs * RUN_BYTES[layout.codes])).to(torch.uint8)
    if layout.codes == "e4m3":
        integers[integers % 128 == 127] = 0
    scales = _random_parameters(rows, num_runs, layout)
    return PackedMatrix(kind, k, _moved(integers), _moved(scales))
