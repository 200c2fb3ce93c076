"""The search for better tile sizes."""

from __future__ import annotations

import pytest
import torch
from gpu.settings import REAL
from gpu.tune import HEADS, candidates

from shmllm_kernels.gpu.configs import DEVICE_KEYS, table_entry


@pytest.mark.parametrize("dim", HEADS)
@pytest.mark.parametrize(("kind", "query_len"), [("decode", 1), ("prefill", 512)])
def test_the_search_contains_the_tables_entries(kind: str, query_len: int, dim: int) -> None:
    heads, kv_heads = HEADS[dim]
    found = candidates(REAL, kind, dim)
    for key in DEVICE_KEYS:
        assert table_entry(key, dim, heads // kv_heads, query_len, torch.bfloat16) in found


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_every_tile_is_tried_with_one_two_and_three_buffers(kind: str) -> None:
    found = candidates(REAL, kind, 128)
    assert {config.num_stages for config in found} == {3, 5, 7}
    assert len(found) == len(set(found))
