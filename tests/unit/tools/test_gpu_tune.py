"""The search for better tile sizes."""

from __future__ import annotations

import pytest
import torch
from gpu import tune_rows
from gpu.settings import REAL
from gpu.tune import HEADS, TABLES, candidates

from shmllm_kernels.gpu.configs import DEVICE_KEYS, single_row_config, table_entry


@pytest.mark.parametrize("dim", HEADS)
@pytest.mark.parametrize("kind", TABLES)
def test_the_search_contains_the_tables_entries(kind: str, dim: int) -> None:
    query_len, is_split = 512 if kind == "prefill" else 1, kind == "split_decode"
    heads, kv_heads = HEADS[dim]
    found = candidates(REAL, kind, dim)
    sizes = dim, heads // kv_heads, query_len, torch.bfloat16
    for key in DEVICE_KEYS:
        assert table_entry(key, *sizes, is_split) in found


@pytest.mark.parametrize("kind", TABLES)
def test_every_tile_is_tried_with_one_two_and_three_buffers(kind: str) -> None:
    found = candidates(REAL, kind, 128)
    assert {config.num_stages for config in found} == {3, 5, 7}
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    ("n", "k"), [(3072, 2048), (6144, 4096), (2048, 8192), (4096, 14_336), (128_256, 2048)]
)
def test_the_search_contains_the_tiles_of_single_rows(n: int, k: int) -> None:
    config = single_row_config(n, k)
    assert (config.block_n, config.block_k, config.num_warps) in tune_rows.CANDIDATES


def test_the_best_tile_of_a_width_has_the_least_time_in_all_its_matrices() -> None:
    first, second = tune_rows.CANDIDATES[:2]
    us = {
        "1b": {
            "qkv": {"k": 2048, "calls": 16, "us": {first: 5.0, second: 6.0}},
            "o": {"k": 2048, "calls": 16, "us": {first: 4.0, second: 2.0}},
            "down": {"k": 8192, "calls": 16, "us": {first: 9.0, second: 10.0}},
        }
    }
    assert tune_rows.best_by_width(us) == {2048: second, 8192: first}
    assert tune_rows.as_python({2048: (4, 1024, 2)}) == "_SINGLE_ROW: 2048: (4, 1024, 2)"
