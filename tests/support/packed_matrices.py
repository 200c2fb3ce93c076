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
RUN_BYTES = {"4": 32, "5": 40, "6": 48, "8": 64, "e2m1": 32, "e4m3": 64}
RECORD_BYTES = {"k": 20, "k6": 18}


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


_MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "4": _nibbles,
    "5": _five_bits,
    "6": _six_bits,
    "8": lambda runs: runs.view(torch.int8),
    "e2m1": lambda runs: torch.cat([_MAGNITUDES, -_MAGNITUDES])[_nibbles(runs)],
    "e4m3": lambda runs: runs.view(torch.float8_e4m3fn),
}


def _of_k(records: Tensor) -> Tensor:
    halves = records[..., :4].contiguous().view(torch.float16).float()
    d, dmin = halves[..., :1, None], halves[..., 1:, None]
    pairs = records[..., 4:].float().reshape(*records.shape[:-1], 4, 2, 2)
    scales, minima = pairs[..., 0, :], pairs[..., 1, :]
    return torch.stack([d * scales, -(dmin * minima)], -2).flatten(-3)


def _of_k6(records: Tensor) -> Tensor:
    d = records[..., :2].contiguous().view(torch.float16).float()
    return d * records[..., 2:].view(torch.int8).float()


def _parameters(scales: Tensor, stored: str) -> Tensor:
    """Returns all parameters of each row, float32."""
    if stored in RECORD_BYTES:
        records = scales.reshape(len(scales), -1, RECORD_BYTES[stored])
        return (_of_k if stored == "k" else _of_k6)(records).flatten(1)
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
        size, num_halves = RECORD_BYTES[layout.stored], 2 if layout.stored == "k" else 1
        records = torch.randint(0, 256, (rows, num_runs // 4, size)).to(torch.uint8)
        halves = torch.randn(rows, num_runs // 4, num_halves) / 64
        records[..., : 2 * num_halves] = _bytes_of(halves.half())
        return records.flatten(1)
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
