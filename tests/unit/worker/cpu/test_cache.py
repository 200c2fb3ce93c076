"""The layouts of the KV cache on a CPU, and when they are those for tile instructions."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.reference_models import make_model

from shmllm.config.engine import CacheConfig, EngineConfig
from shmllm.config.load import LoadConfig
from shmllm.errors import EngineStartError
from shmllm.models.kv_heads import KVHeads
from shmllm.worker.cpu.cache import layout_of, stored_as
from shmllm.worker.cpu.runner import CpuRunner
from shmllm.worker.ranks import NoRanks
from shmllm_kernels.cpu.amx import HAS_AMX
from shmllm_kernels.cpu.cache_layout import IN_TILES, CacheLayout
from shmllm_kernels.cpu.latent_layout import LatentLayout


def test_bfloat16_is_stored_for_tiles_in_blocks_of_whole_tiles() -> None:
    assert stored_as("bfloat16", 16, uses_tiles=True) == IN_TILES
    assert stored_as("bfloat16", 128, uses_tiles=True) == IN_TILES
    assert stored_as("bfloat16", 8, uses_tiles=True) == "bfloat16"
    assert stored_as("bfloat16", 16, uses_tiles=False) == "bfloat16"
    assert stored_as("int8", 16, uses_tiles=True) == "int8"


def test_latents_have_no_layout_for_tiles() -> None:
    layout = layout_of(KVHeads(1, 80, 0), 16, IN_TILES)
    assert isinstance(layout, LatentLayout)
    assert layout.stored == "bfloat16"


@pytest.mark.parametrize(("head_dim", "of_keys", "of_values"), [(64, 64, 64), (80, 96, 80)])
def test_heads_are_padded_to_whole_tiles(head_dim: int, of_keys: int, of_values: int) -> None:
    layout = layout_of(KVHeads(3, head_dim, head_dim), 32, IN_TILES)
    assert isinstance(layout, CacheLayout)
    assert layout.block_bytes == 3 * 32 * 2 * (of_keys + of_values)


def test_float8_is_refused_with_what_a_cpu_has(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    load = LoadConfig(str(tmp_path), kv_cache_dtype="fp8")
    config = EngineConfig(load, CacheConfig(memory_bytes=2**22), num_threads=1)
    with pytest.raises(EngineStartError, match="'fp8' is for a GPU: on a CPU pass 'int8'"):
        CpuRunner(config, ranks=NoRanks(1))


@pytest.mark.skipif(not HAS_AMX, reason="the CPU lacks AMX, or Linux refuses it")
def test_engines_with_and_without_tiles_share_no_blocks(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    stored = {}
    for instructions in ("tiles", "vectors"):
        load = LoadConfig(str(tmp_path), dtype="bfloat16", cpu_instructions=instructions)
        config = EngineConfig(load, CacheConfig(memory_bytes=2**22), num_threads=1)
        runner = CpuRunner(config, ranks=NoRanks(1))
        assert runner.info.kv_cache_dtype == "bfloat16"
        stored[instructions] = runner.numerics()["cache"]
    assert stored == {"tiles": IN_TILES, "vectors": "bfloat16"}
