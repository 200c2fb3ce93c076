"""The machine code of attention by tile instructions; test_attention.py has what it computes."""

from __future__ import annotations

import re

import pytest
from llvmlite import binding

from shmllm_kernels.cpu.attention import ATTEND
from shmllm_kernels.cpu.cache_layout import IN_TILES
from tests.unit.kernels.cpu.test_matrix_tiles import NEEDS_X86, assembly, loops_with


@pytest.fixture(scope="module")
def code() -> str:
    binding.initialize_native_target()
    binding.initialize_native_asmparser()
    return assembly(ATTEND[IN_TILES, "bfloat16"])


@NEEDS_X86
def test_the_innermost_loops_multiply_and_keep_nothing_in_memory(code: str) -> None:
    loops = loops_with(code, "tdpbf16ps")
    sums = [set(re.findall(r"tdpbf16ps\s.*%tmm(\d)$", "\n".join(loop), re.M)) for loop in loops]
    assert {"".join(sorted(each)) for each in sums} == {"0", "01", "0123"}
    are_prefetching = set()
    for loop, of_loop in zip(loops, sums, strict=True):
        counts = {
            name: sum(line.startswith(name) for line in loop)
            for name in ("tdpbf16ps", "tileloadd", "prefetch")
        }
        num_steps = counts["tdpbf16ps"] // len(of_loop)
        assert counts["tdpbf16ps"] == num_steps * len(of_loop), "each step adds to each sum"
        assert counts["tileloadd"] == num_steps * (1 + len(of_loop))
        are_prefetching.add(counts["prefetch"] > 0)
        assert not any(line.startswith("call") for line in loop)
        assert not any(re.search(r"mov\S+\s+%\S+, -?\d*\(%rsp\)", line) for line in loop), "spills"
    assert are_prefetching == {True, False}


@NEEDS_X86
def test_the_code_stores_each_tile_of_sums_once(code: str) -> None:
    of_tiles = 4 + 2 + 1
    products, with_and_without_prefetching = 2, 2
    expected = of_tiles * products * with_and_without_prefetching
    assert len(re.findall(r"\ttilestored\b", code)) == expected, "LLVM has spilled tiles"
    for instruction in ("ldtilecfg", "tilerelease"):
        assert len(re.findall(rf"\t{instruction}\b", code)) == 1
