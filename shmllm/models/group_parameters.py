"""The parameters of packed matrices' groups, as they are stored.

float16, ...    the parameters of each run, one after the other: its scales, then the others
k               20 bytes for 256 elements: a scale d and a scale e, float16; then for each run
                two factors of d and two of -e, a byte each
k6              18 bytes for 256 elements: a scale, float16, and 16 signed factors of a byte
e8m0            a byte b for each scale 2 ** (b - 127)
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
K_BYTES, K6_BYTES = 20, 18


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


def _widened_k6(memory: Tensor, count: int) -> Tensor:
    records = memory.unflatten(1, (-1, K6_BYTES))
    factors = records[..., 2:].contiguous().view(torch.int8).float()
    widened: Tensor = factors * _halves(records[..., :2])
    return widened.reshape(len(memory), -1, count)


def _store_k6(parameters: Tensor, memory: Tensor) -> None:
    wanted = parameters.flatten(1).unflatten(1, (-1, 16))
    scales = (wanted.abs().amax(-1, keepdim=True) / 127).clamp_(0, LARGEST_SCALE).half()
    inverse = torch.where(scales == 0, 0.0, 1 / scales.float())
    factors = (wanted * inverse).round_().clamp_(-127, 127).to(torch.int8)
    records = memory.unflatten(1, (-1, K6_BYTES))
    records[..., :2] = scales.view(torch.uint8)
    records[..., 2:] = factors.view(torch.uint8)


def _widened_powers(memory: Tensor, count: int) -> Tensor:
    ones = torch.ones(memory.shape, dtype=torch.float64, device=memory.device)
    powers = torch.ldexp(ones, memory.int() - 127)
    return powers.float().reshape(len(memory), -1, count)


def _store_powers(parameters: Tensor, memory: Tensor) -> None:
    memory.copy_(torch.frexp(parameters.flatten(1)).exponent - 1 + 127)


PARAMETERS = {
    "float16": _plain(torch.float16),
    "bfloat16": _plain(torch.bfloat16),
    "float32": _plain(torch.float32),
    "k": Parameters(torch.uint8, _record_width(K_BYTES), _widened_k, _store_k, True, RECORD_RUNS),
    "k6": Parameters(
        torch.uint8, _record_width(K6_BYTES), _widened_k6, _store_k6, True, RECORD_RUNS
    ),
    "e8m0": Parameters(
        torch.uint8, lambda runs, count: runs * count, _widened_powers, _store_powers
    ),
}
