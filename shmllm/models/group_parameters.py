"""The parameters of packed matrices' groups, as they are stored.

float16, ...    the parameters of each run, one after the other: its scales, then the others
k               20 bytes for 256 elements: a scale d and a scale e, float16; then for each run
                two factors of d and two of -e, a byte each
k2              20 bytes for 256 elements: a scale d and a scale e, float16; then for each 16
                elements a byte with a factor of d in its lower half and one of -e in its upper
k6              18 bytes for 256 elements: a scale, float16, and 16 signed factors of a byte
k8              10 bytes for 256 elements: a scale, float16, and 8 signed factors of a byte
e8m0            a byte b for each scale 2 ** (b - 127)
e4m3            8 bytes for 64 elements: a scale, float32, and 4 factors of the format e4m3
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shmllm.errors import EngineStartError
from shmllm.models.codes import RUN

LARGEST_SCALE = torch.finfo(torch.float16).max
RECORD_RUNS = 4
"""The runs of a record."""
K_BYTES = 20
_HALF_BYTES = 2


@dataclass(frozen=True, slots=True)
class Parameters:
    """
    Attributes:
        dtype: that of the memory.
        width: (runs, parameters of a run) -> the elements of a row of that dtype.
        widened: (memory [rows, width], parameters of a run) -> [rows, runs, parameters] float32.
        store: (parameters [rows, runs, parameters] float32, memory) rounds them into the memory.
        is_coarse: whether rounding them changes them much.
        record_runs: the number of runs whose parameters are stored together.
    """

    dtype: torch.dtype
    width: Callable[[int, int], int]
    widened: Callable[[Tensor, int], Tensor]
    store: Callable[[Tensor, Tensor], object]
    is_coarse: bool = False
    record_runs: int = 1


def _store_plain(parameters: Tensor, memory: Tensor) -> None:
    largest = torch.finfo(memory.dtype).max
    memory.copy_(parameters.flatten(1).clamp(-largest, largest))
    memory.masked_fill_(memory == 0, 0)  # without a sign


def _plain(dtype: torch.dtype) -> Parameters:
    return Parameters(
        dtype,
        lambda runs, count: runs * count,
        lambda memory, count: memory.float().unflatten(1, (-1, count)),
        _store_plain,
    )


def _record_width(num_bytes: int) -> Callable[[int, int], int]:
    def width(runs: int, count: int) -> int:
        if runs % RECORD_RUNS:
            raise EngineStartError(
                f"rows of a format with records of {RECORD_RUNS * RUN} columns cannot have {runs} "
                f"times {RUN}: take another number of ranks"
            )
        return runs // RECORD_RUNS * num_bytes

    return width


def _halves(memory: Tensor) -> Tensor:
    return memory.contiguous().view(torch.float16).float()


def _signs(memory: Tensor) -> Tensor:
    """Those of d and e."""
    return torch.tensor([1.0, -1.0], device=memory.device)


def _widened_k(memory: Tensor, count: int) -> Tensor:
    records = memory.unflatten(1, (-1, K_BYTES))
    scales = _halves(records[..., :4]) * _signs(memory)
    factors = records[..., 4:].float().unflatten(2, (RECORD_RUNS, 2, 2))
    widened: Tensor = factors * scales[:, :, None, :, None]
    return widened.reshape(len(memory), -1, count)


def _store_k(parameters: Tensor, memory: Tensor) -> None:
    wanted = parameters.unflatten(1, (-1, RECORD_RUNS)).unflatten(3, (2, 2))
    wanted = wanted * _signs(memory)[:, None]
    scales = (wanted.amax((2, 4)) / 63).clamp_(0, LARGEST_SCALE).half()
    inverse = torch.where(scales == 0, 0.0, 1 / scales.float())
    factors = (wanted * inverse[:, :, None, :, None]).round_().clamp_(0, 63)
    records = memory.unflatten(1, (-1, K_BYTES))
    records[..., :4] = scales.view(torch.uint8)
    records[..., 4:] = factors.flatten(2).to(torch.uint8)


def _widened_k2(memory: Tensor, count: int) -> Tensor:
    records = memory.unflatten(1, (-1, K_BYTES))
    factors = torch.stack([records[..., 4:] & 15, records[..., 4:] >> 4], 2).float()
    widened = factors * (_halves(records[..., :4]) * _signs(memory))[..., None]
    per_run: Tensor = widened.unflatten(3, (RECORD_RUNS, -1)).transpose(2, 3)
    return per_run.reshape(len(memory), -1, count)


def _store_k2(parameters: Tensor, memory: Tensor) -> None:
    wanted = parameters.unflatten(1, (-1, RECORD_RUNS)).unflatten(3, (2, -1))
    wanted = (wanted * _signs(memory)[:, None]).transpose(2, 3).flatten(3)
    factors, scales = _rounded(wanted, 15)
    records = memory.unflatten(1, (-1, K_BYTES))
    records[..., :4] = scales.flatten(2).view(torch.uint8)
    low, high = factors.clamp_min(0).to(torch.uint8).unbind(2)
    records[..., 4:] = low | high << 4


def _rounded(wanted: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Returns integers and a scale, float16 [..., 1], whose products are near numbers [..., n]."""
    scales = (wanted.abs().amax(-1, keepdim=True) / largest).clamp_(0, LARGEST_SCALE).half()
    inverse = torch.where(scales == 0, 0.0, 1 / scales.float())
    return (wanted * inverse).round_().clamp_(-largest, largest), scales


def _with_factors(num_factors: int) -> Parameters:
    """A scale for a record and signed factors of a byte."""
    size = _HALF_BYTES + num_factors

    def widened(memory: Tensor, count: int) -> Tensor:
        records = memory.unflatten(1, (-1, size))
        factors = records[..., _HALF_BYTES:].contiguous().view(torch.int8).float()
        numbers: Tensor = factors * _halves(records[..., :_HALF_BYTES])
        return numbers.reshape(len(memory), -1, count)

    def store(parameters: Tensor, memory: Tensor) -> None:
        factors, scales = _rounded(parameters.flatten(1).unflatten(1, (-1, num_factors)), 127)
        records = memory.unflatten(1, (-1, size))
        records[..., :_HALF_BYTES] = scales.view(torch.uint8)
        records[..., _HALF_BYTES:] = factors.to(torch.int8).view(torch.uint8)

    return Parameters(torch.uint8, _record_width(size), widened, store, True, RECORD_RUNS)


def _widened_powers(memory: Tensor, count: int) -> Tensor:
    ones = torch.ones(memory.shape, dtype=torch.float64, device=memory.device)
    powers = torch.ldexp(ones, memory.int() - 127)
    return powers.float().reshape(len(memory), -1, count)


def _store_powers(parameters: Tensor, memory: Tensor) -> None:
    memory.copy_(torch.frexp(parameters.flatten(1)).exponent - 1 + 127)


_FLOAT8 = torch.float8_e4m3fn
_LARGEST_FLOAT8 = torch.finfo(_FLOAT8).max
_WIDE_BYTES = 4


def _widened_float8(memory: Tensor, count: int) -> Tensor:
    runs = memory.unflatten(1, (-1, _WIDE_BYTES + count))
    scales = runs[..., :_WIDE_BYTES].contiguous().view(torch.float32)
    widened: Tensor = runs[..., _WIDE_BYTES:].contiguous().view(_FLOAT8).float() * scales
    return widened


def _store_float8(parameters: Tensor, memory: Tensor) -> None:
    """The scale of a row is that of all of its runs."""
    scales = parameters.abs().amax((1, 2), keepdim=True) / _LARGEST_FLOAT8
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    factors = (parameters * inverse).clamp_(-_LARGEST_FLOAT8, _LARGEST_FLOAT8).to(_FLOAT8)
    runs = memory.unflatten(1, (-1, _WIDE_BYTES + parameters.shape[2]))
    runs[..., :_WIDE_BYTES] = scales.expand(-1, runs.shape[1], -1).contiguous().view(torch.uint8)
    runs[..., _WIDE_BYTES:] = factors.view(torch.uint8)


PARAMETERS = {
    "float16": _plain(torch.float16),
    "bfloat16": _plain(torch.bfloat16),
    "float32": _plain(torch.float32),
    "k": Parameters(torch.uint8, _record_width(K_BYTES), _widened_k, _store_k, True, RECORD_RUNS),
    "k2": Parameters(
        torch.uint8, _record_width(K_BYTES), _widened_k2, _store_k2, True, RECORD_RUNS
    ),
    "k6": _with_factors(16),
    "k8": _with_factors(8),
    "e8m0": Parameters(
        torch.uint8, lambda runs, count: runs * count, _widened_powers, _store_powers
    ),
    "e4m3": Parameters(
        torch.uint8,
        lambda runs, count: runs * (_WIDE_BYTES + count),
        _widened_float8,
        _store_float8,
        True,
    ),
}
