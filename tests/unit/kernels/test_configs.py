"""The tables of tile sizes: every shape that the kernels support has a valid entry."""

from __future__ import annotations

import pytest
import torch

from shmllm_kernels.gpu import configs
from shmllm_kernels.gpu.configs import (
    attention_config,
    next_power_of_two,
    num_splits,
    row_warps,
    table_entry,
)

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


@pytest.fixture(params=[(8, 0), (9, 0)], ids=["ampere", "hopper"])
def capability(request, monkeypatch):
    monkeypatch.setattr(configs, "_capability", lambda index: request.param)
    monkeypatch.setattr(configs, "_num_multiprocessors", lambda index: 132)
    return request.param


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("max_query_len", [1, 2, 4096])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
def test_every_shape_has_a_valid_entry(capability, head_dim, max_query_len, dtype):
    for heads_per_kv in (1, 3, 8, 71):
        config = attention_config(GPU, head_dim, heads_per_kv, max_query_len, dtype)
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


def test_splits_give_each_multiprocessor_at_most_two_programs(capability):
    for requests in range(1, 600):
        splits = num_splits(GPU, requests, 8)
        assert splits == next_power_of_two(splits) <= configs.MAX_SPLITS
        assert splits == 1 or requests * 8 * splits <= 2 * 132
        assert splits == configs.MAX_SPLITS or requests * 8 * splits * 2 > 2 * 132
        assert num_splits(GPU, requests, 8, deterministic=True) == configs.DETERMINISTIC_SPLITS
    assert num_splits(CPU, 1, 1) > 1


def test_row_warps():
    assert [row_warps(dim) for dim in (1, 512, 1024, 4096, 65_536)] == [1, 1, 2, 8, 16]
