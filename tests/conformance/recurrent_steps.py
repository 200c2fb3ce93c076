"""Steps of requests with recurrent states, for the tests of kernels that have these."""

from __future__ import annotations

import torch

from shmllm_kernels.gpu.states import Requests

INTERVAL, LENGTH, NUM_BLOCKS = 4, 11, 40
STEPS = [
    [[(0, 0, 11)], [(1, 0, 11)]],
    [[(0, 0, 3), (1, 0, 8)], [(1, 8, 9), None, (0, 3, 11)], [(1, 9, 11)]],
    [[(0, 0, 4)], [(1, 0, 1), (0, 4, 5)], [(0, 5, 11), (1, 1, 11)]],
]
"""Steps of two requests of LENGTH tokens: (request, start, end), or None for a padded one."""


def tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """The absolute and the relative tolerance: sums of rounded numbers."""
    return {
        torch.float32: (2e-5, 1e-4),
        torch.float16: (2e-3, 4e-3),
        torch.bfloat16: (2e-2, 2e-2),
    }[dtype]


class Run:
    """Steps of requests whose states lie in blocks, and begin as NaN."""

    def __init__(self, width, device):
        self.states = torch.full((NUM_BLOCKS, width), float("nan"), device=device)
        blocks = torch.randperm(NUM_BLOCKS)[:8].view(2, 4)
        self.table = blocks.to(device=device, dtype=torch.int32)

    def requests(self, step):
        """What kernels read of a step. A padded request has any block."""
        parts = [part or (0, 0, 0) for part in step]
        counts = torch.tensor([0] + [end - start for _, start, end in parts])
        device = self.table.device
        return Requests(
            counts.cumsum(0).to(device=device, dtype=torch.int32),
            torch.tensor([end for *_, end in parts], dtype=torch.int32, device=device),
            self.table[[request for request, *_ in parts]],
            INTERVAL,
        )

    def state(self, request, length):
        return self.states[self.table[request, (length - 1) // INTERVAL].item()]


def rows_of(x, step):
    return torch.cat([x[0, :0], *(x[part[0], part[1] : part[2]] for part in step if part)])


def put(out, rows, step):
    begin = 0
    for request, start, end in filter(None, step):
        out[request, start:end] = rows[begin : begin + end - start]
        begin += end - start
