"""Runs CPU kernels of recurrent layers on requests whose tokens come in steps of any sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shmllm_kernels.cpu import KernelProgram

NUM_BLOCKS, INTERVAL = 64, 8


class States:
    """The blocks of some requests, whose tokens are computed in steps of any sizes."""

    def __init__(self, num_requests: int, block_bytes: int, interval: int = INTERVAL) -> None:
        self.interval = interval
        self.memory = torch.full((NUM_BLOCKS, block_bytes), 0xFF, dtype=torch.uint8)
        table = 1 + torch.randperm(NUM_BLOCKS - 1)
        per_request = (NUM_BLOCKS - 1) // num_requests
        table = table[: per_request * num_requests].view(num_requests, per_request)
        self.table = table.to(torch.int32).contiguous()

    def run(self, kernel: Any, steps: list[tuple[int, int, int]], *operands: Any) -> None:
        """Runs a step of these (request, start, end), whose tokens lie side by side."""
        columns = np.array([(row, end - start, end) for row, start, end in steps], np.int64).T
        rows, counts, ends = map(np.ascontiguousarray, columns)
        firsts = np.cumsum(counts) - counts
        step = np.array([counts.sum(), len(steps)])
        numbers = [array.ctypes.data for array in (step, firsts, counts, ends, rows)]
        numbers += [self.table.data_ptr(), self.table.shape[1], self.interval]
        numbers += [self.memory.data_ptr(), self.memory.shape[1]]
        numbers += [each.data_ptr() if isinstance(each, Tensor) else each for each in operands]
        program = KernelProgram(2)
        program.record(kernel, numbers)
        program.replay()


def divided(length: int, sizes: list[int]) -> list[tuple[int, int]]:
    """The bounds of steps of some sizes, the last one again and again."""
    bounds, start = [], 0
    while start < length:
        end = min(start + (sizes.pop(0) if len(sizes) > 1 else sizes[0]), length)
        bounds.append((start, end))
        start = end
    return bounds


DIVISIONS = [[50], [1], [3, 1, 1, 7, 8, 2], [8], [16, 5, 1], [1, 49]]
"""The sizes of steps for 50 tokens."""
