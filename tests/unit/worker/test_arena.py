"""The sizes that arenas allocate."""

from __future__ import annotations

import pytest
import torch

from shmllm.worker.arena import padded_bytes


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [
        ((16,), torch.float32, 64),
        ((17,), torch.float32, 128),
        ((33,), torch.bfloat16, 128),
        ((1,), torch.float16, 64),
        ((0, 4), torch.float32, 0),
    ],
)
def test_sizes_are_rounded_up_to_the_alignment(shape, dtype, size):
    assert padded_bytes(shape, dtype) == size
