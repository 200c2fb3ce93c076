"""Engines of two ranks that share a prefix cache have the bits of one that shares nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.determinism import ask, ask_shuffled, make_requests
from support.reference_models import RECURRENT, VARIANTS, make_model
from support.variants import slow

from shmllm import LLM
from shmllm.shared_kv.folder import folders

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks", "own_regions")]

ALONE: dict[str, Any] = {
    "dtype": "float32",
    "multiprocess": False,
    "tensor_parallel_size": 2,
    "mamba_block_size": 32,
}
SHARED: dict[str, Any] = ALONE | {"shared_kv_cache_bytes": "48M"}
DEFAULT = "llama"
SETTINGS: dict[str, dict[str, Any]] = {
    "in-place": {},
    "copies": {"shared_kv_cache_reads": "copy"},
    "overlapped": {"async_scheduling": True},
    "copies-overlapped": {"shared_kv_cache_reads": "copy", "async_scheduling": True},
    "smallest-cache": {"kv_cache_memory_bytes": 5 * 2**19, "max_model_len": 720},
}
FAMILIES = [DEFAULT, *dict.fromkeys(each for each in (*VARIANTS, *RECURRENT) if each != DEFAULT)]


def files() -> list[str]:
    """The names in the folders of regions."""
    return sorted(path.name for folder in folders() for path in folder.iterdir())


def test_blocks_of_another_engine_change_no_bit(tmp_path: Path) -> None:
    """Those of an engine that runs, in place and while steps overlap."""
    make_model(DEFAULT, tmp_path, max_position_embeddings=1024)
    requests = make_requests(4096, 16, seed=3)
    with LLM(str(tmp_path), **SHARED) as first:
        expected = ask(first, requests)
        once = first.get_metrics()["prefix_hit_tokens"]
        with LLM(str(tmp_path), **SHARED, **SETTINGS["overlapped"]) as second:
            assert ask_shuffled(second, requests, seed=4) == expected
            assert second.get_metrics()["prefix_hit_tokens"] > 2 * once
            assert files() == ["0", "1"]
    assert files() == ["0", "1"]


@pytest.mark.parametrize("kind", [slow(kind) for kind in FAMILIES])
def test_families_in_all_ways(tmp_path: Path, kind: str) -> None:
    make_model(kind, tmp_path, max_position_embeddings=1024)
    requests = make_requests(4096, 16, seed=3)
    with LLM(str(tmp_path), **ALONE) as alone:
        expected = ask(alone, requests)
        once = alone.get_metrics()["prefix_hit_tokens"]
    with LLM(str(tmp_path), **SHARED) as first:
        assert ask(first, requests) == expected
        for name, options in SETTINGS.items():
            with LLM(str(tmp_path), **(SHARED | options)) as second:
                assert ask_shuffled(second, requests, seed=4) == expected, name
                assert second.get_metrics()["prefix_hit_tokens"] > 2 * once, name
                assert ask(second, requests) == expected, f"{name}, repeated"
        assert ask(first, requests) == expected
    with LLM(str(tmp_path), **SHARED) as third:
        assert ask(third, requests) == expected
        assert third.get_metrics()["prefix_hit_tokens"] > 2 * once


@pytest.mark.slow
def test_blocks_of_all_ranks_are_kept_on_disk(tmp_path: Path) -> None:
    make_model("qwen3_next", tmp_path / "model", max_position_embeddings=1024)
    requests = make_requests(4096, 8, seed=3)
    options = SHARED | {"shared_kv_cache_path": str(tmp_path / "disk")}
    with LLM(str(tmp_path / "model"), **options) as llm:
        expected = ask(llm, requests)
        once = llm.get_metrics()["prefix_hit_tokens"]
    for folder in folders():
        shutil.rmtree(folder)  # as if the machine had been started again
    with LLM(str(tmp_path / "model"), **options) as llm:
        assert ask(llm, requests) == expected
        assert llm.get_metrics()["prefix_hit_tokens"] > 2 * once


@pytest.mark.slow
def test_other_numbers_of_ranks_share_nothing(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    requests = make_requests(4096, 4, seed=3)
    found = []
    for size in (1, 2, 4):
        with LLM(
            str(tmp_path), **(SHARED | {"tensor_parallel_size": size, "num_threads": 4})
        ) as llm:
            ask(llm, requests)
            found.append(llm.get_metrics()["prefix_hit_tokens"])
    assert len(folders()) == 3
    assert len(set(found)) == 1
