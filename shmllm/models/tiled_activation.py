"""The MLP's activation with rows that do not depend on the batch, bit for bit.

torch computes a few elements at the end of each thread's share one by one and the others as
vectors, and in float32 the two differ in the last bit of about every 25th number. Where the
shares end inside a row, the number of rows shows. Owns the search for numbers of rows where
they do not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shmllm.errors import EngineStartError
from shmllm.models.row_tiles import MARGIN, ROW_COUNTS, RowTiles, find_row_counts
from shmllm_kernels import silu_and_mul

POOL = 2048
"""A multiple of any vector's length."""


def _telling_numbers(dtype: torch.dtype) -> Tensor:
    """Numbers whose activation differs between vectors and single elements; if there are none,
    any."""
    numbers = (3 * torch.randn(POOL, generator=torch.Generator().manual_seed(1))).to(dtype)
    singly = torch.stack([F.silu(number) for number in numbers])
    telling = numbers[F.silu(numbers) != singly]
    return telling if len(telling) else numbers


def tiled_activation(width: int, dtype: torch.dtype) -> RowTiles:
    """`silu_and_mul` in proven numbers of rows.

    Args:
        width: of the result; the input is twice as wide.

    Raises:
        EngineStartError: no number of rows holds.
    """
    numbers = _telling_numbers(dtype)
    num_rows = ROW_COUNTS[-1] + MARGIN
    places = torch.arange(num_rows * width) * 7 % len(numbers)
    gate = numbers[places].view(num_rows, width)
    counts = find_row_counts(silu_and_mul, torch.cat([gate, torch.ones_like(gate)], 1))
    if not counts:
        raise EngineStartError(
            f"deterministic=True cannot be held on this machine: torch's silu of {width:,} "
            f"numbers in {dtype} depends on a row's place"
        )
    return RowTiles(silu_and_mul, counts)
