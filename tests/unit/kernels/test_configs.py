"""The tables of tile sizes: every shape that the kernels support has a valid entry."""

from __future__ import annotations

import itertools

import pytest
import torch

from shmllm_kernels.gpu import configs
from shmllm_kernels.gpu.configs import (
    ROWS_OF_PRODUCTS,
    attention_config,
    next_power_of_two,
    num_splits,
    packed_config,
    product_config,
    row_warps,
    table_entry,
)

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
PROCESSORS = 132
HEADS = (32, 8)
"""Query heads and key-value heads."""


@pytest.fixture(params=[(8, 0), (9, 0)], ids=["ampere", "hopper"])
def capability(request, monkeypatch):
    monkeypatch.setattr(configs, "_capability", lambda index: request.param)
    monkeypatch.setattr(configs, "_num_multiprocessors", lambda index: PROCESSORS)
    return request.param


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("max_query_len", [1, 2, 4096])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
def test_every_shape_has_a_valid_entry(capability, head_dim, max_query_len, dtype):
    for heads_per_kv, is_split in itertools.product((1, 3, 8, 71), (False, True)):
        sizes = head_dim, heads_per_kv, max_query_len, dtype
        config = attention_config(GPU, *sizes, is_split)
        whole = attention_config(GPU, *sizes)
        assert config.block_m == whole.block_m, "the number of splits depends on it"
        for size in (config.block_m, config.tile, config.num_warps):
            assert size == next_power_of_two(size)
        assert config.block_m >= max(heads_per_kv, 16)
        assert config.tile >= 16


def test_a_device_has_the_entries_of_its_key(capability):
    key = {8: "any", 9: "sm90"}[capability[0]]
    for max_query_len in (1, 512):
        sizes = 128, 4, max_query_len, torch.bfloat16
        assert attention_config(GPU, *sizes) == table_entry(key, *sizes)
    assert {configs.device_key(GPU), configs.device_key(CPU)} <= set(configs.DEVICE_KEYS)


def test_devices_without_entries_of_their_own_share_the_default(monkeypatch):
    monkeypatch.setattr(configs, "_capability", lambda index: (12, 1))
    assert configs.device_key(GPU) == configs.device_key(CPU) == "any"


@pytest.mark.parametrize("max_query_len", [1, 512])
def test_splits_give_each_multiprocessor_at_most_four_programs(capability, max_query_len):
    config = attention_config(GPU, 128, 4, max_query_len, torch.bfloat16)
    for requests in range(1, 600):
        splits = num_splits(GPU, config, requests, requests, *HEADS)
        assert splits == next_power_of_two(splits) <= configs.MAX_SPLITS
        assert splits == 1 or requests * 8 * splits <= 4 * PROCESSORS
        assert splits == configs.MAX_SPLITS or requests * 8 * splits * 2 > 4 * PROCESSORS
    assert num_splits(CPU, config, 1, 1, 1, 1) > 1


def test_a_short_chunk_of_a_prompt_is_split_and_a_long_one_is_not(capability):
    config = attention_config(GPU, 128, 4, 512, torch.bfloat16)
    found = [num_splits(GPU, config, tokens, 1, *HEADS) for tokens in (8, 256, 2048, 8192)]
    assert found == sorted(found, reverse=True)
    assert found[0] == configs.MAX_SPLITS
    assert found[1] > found[3] == 1
    assert num_splits(GPU, config, 64, 60, *HEADS) == 1, "60 of them are decodes"


def test_row_warps():
    assert [row_warps(dim) for dim in (1, 512, 1024, 4096, 65_536)] == [1, 1, 2, 8, 16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_and_other_experts_share_blocks_of_pairs(capability, dtype):
    rows = range(1, 300)
    sizes = [packed_config(count, dtype).block_m for count in rows]
    assert sizes == [product_config(GPU, count, dtype).block_m for count in rows]
    starts = [count for count in rows if count == 1 or sizes[count - 1] != sizes[count - 2]]
    assert set(starts) <= set(ROWS_OF_PRODUCTS)
