"""Every kernel launch compiles for GPUs, fits into their shared memory and does not spill, and the
loops of attention and of products with packed weights load ahead of their use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shmllm_kernels.gpu.packings import PACKINGS

TESTS = Path(__file__).resolve().parents[2]
SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""The shared memory of a multiprocessor. The table for 8.0 is that for 8.6, 8.9 and 12.0, too."""
SYSTEM_BYTES = 1024
"""The shared memory that each program takes in addition."""
REGISTERS = 65_536
"""The registers of a multiprocessor."""
SPILLED_BYTES = 64
"""The stack bytes of a few registers that a long prologue spills; a loop that spills needs more.
Attention keeps some of those in memory that it needs behind its loops."""
ONE_PROGRAM_BEYOND = 256
"""Of wider heads, two buffers for keys and values leave no room for a second program but on 9.0."""
FLOAT8_SPILLS = {80: 4, 90: 224}
"""The instructions that load or store spilled registers in the loops of prompts with heads of 512
and FP8 keys, by capability. On 9.0 their sums take half of the registers; these are a fifth of the
instructions in these loops."""
MASK_LOADS = 8
"""Behind its loop a split program passes the mask of its rows through shared memory, in bytes."""
GROUPS_PER_TILE = 3
"""The table's entries, the keys and the values of a tile are copied as one group each."""

LEAST_STAGES = 5
"""With fewer stages, a program of attention waits for its own loads."""
LOADED = 8
"""The elements of bfloat16 in a load of 16 bytes."""
WORDS_OF_BLOCK = 5
"""Of a program of experts: the number of blocks, a block's expert, first place and size, and one or
more pairs."""

Kernel = dict[str, Any]


def launches(capability: int, cache: Path | None, *parts: str) -> list[Kernel]:
    """Compile launches in a process of its own.

    Args:
        capability: the compute capability.
        cache: an empty directory for what Triton compiles; None: its own, where a launch is found
            as long as its kernel, its options and Triton stay the same.
        parts: which launches.
    """
    directory = {} if cache is None else {"TRITON_CACHE_DIR": str(cache)}
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    search = os.pathsep.join([str(TESTS), *sys.path])
    done = subprocess.run(
        [sys.executable, str(TESTS / "support/kernel_launches.py"), str(capability), *parts],
        env=kept | directory | {"PYTHONPATH": search},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(found: list[Kernel], capability: int) -> None:
    for kernel in found:
        print(kernel)
        assert kernel["shared_bytes"] <= SHARED_BYTES[capability]
        assert not kernel["is_double"]
        if kernel.get("dtype") != "torch.float32":
            if kernel["kernel"] != "attend":
                assert kernel["stack_bytes"] <= SPILLED_BYTES
            else:
                assert not kernel["spills_in_loops"]
                check_attention(kernel, capability)
            if kernel["kernel"] == "attend_latents":
                check_latents(kernel, capability)
            if "kind" in kernel:
                check_packed(kernel, capability)
            if "experts" in kernel:
                check_experts(kernel, capability)


def check_attention(kernel: Kernel, capability: int) -> None:
    is_decode = kernel["max_query_len"] == 1
    assert kernel["mma"] or kernel["wgmma"]
    if capability == 90 and not is_decode:
        assert kernel["wgmma"], "Hopper's instruction wgmma is not used"
    has_one_loop = kernel["masks_all"]
    num_loops = 1 if has_one_loop else 2 if kernel["window"] is None else 3
    assert len(kernel["loops"]) == len(kernel["waits"]) == num_loops
    for loop, waits in zip(kernel["loops"], kernel["waits"], strict=True):
        if kernel["num_stages"] < LEAST_STAGES:
            assert is_decode, "programs of prompts are too few to hide each other's loads"
            continue
        assert len(loop["buffers"]) == 2, "one for keys, one for values"
        assert min(loop["buffers"]) >= max((kernel["num_stages"] - 1) // 2, 2)
        assert min(loop["waits"]) >= GROUPS_PER_TILE, "it waits for all loads of the next tile"
        assert sorted(waits) == sorted(loop["waits"]), "PTX differs from Triton's dialect"
    if is_decode and (capability == 90 or kernel["shape"][2] <= ONE_PROGRAM_BEYOND):
        assert 2 * 32 * kernel["num_warps"] * kernel["registers"] <= REGISTERS
        assert (
            2 * (kernel["shared_bytes"] + SYSTEM_BYTES) <= SHARED_BYTES[capability] + SYSTEM_BYTES
        )


def check_latents(kernel: Kernel, capability: int) -> None:
    """The loop keeps the latents of a later tile in flight, and reads each latent once."""
    assert kernel["mma"] or kernel["wgmma"]
    if capability == 90 and kernel["block_m"] >= 64:
        assert kernel["wgmma"], "Hopper's instruction wgmma is not used"
    (loop,) = kernel["loops"]
    assert len(loop["buffers"]) == 2, "one for latents, one for key parts"
    assert min(loop["buffers"]) >= 2
    assert min(loop["waits"]) >= GROUPS_PER_TILE, "it waits for all loads of the next tile"


def check_packed(kernel: Kernel, capability: int) -> None:
    """Each operation of unpacking is rounded by itself; products use tensor cores, and load the
    codes and the rows of activations of later iterations while they compute."""
    assert not kernel["contractions"]
    if kernel["kernel"] == "_unpack_rows":
        return
    assert kernel["mma"] or kernel["wgmma"]
    if capability == 90 and kernel["block_m"] >= 64:
        assert kernel["wgmma"], "Hopper's instruction wgmma is not used"
    (loop,), (waits,) = kernel["loops"], kernel["waits"]
    assert min(loop["buffers"]) >= 2
    loads_a_run = 3  # the codes, and the halves of the rows
    assert min(waits) >= loads_a_run * kernel["block_k"] // 64


def check_experts(kernel: Kernel, capability: int) -> None:
    """Products use tensor cores, and while they wait for one tile, the copies of all others but one
    are in flight. Few rows have so many programs on a multiprocessor of an H100 as the arithmetic
    says, and a dependent launch has read its block before it waits."""
    assert kernel["mma"] or kernel["wgmma"] or kernel["tcgen05"]
    if capability >= 90 and kernel["kernel"] == "_down":
        assert kernel["loads_before_wait"] >= WORDS_OF_BLOCK
    if capability == 100 and kernel["block_m"] > 16:
        return  # `pipelines` does not know the loops of tcgen05.mma
    if capability == 90 and kernel["block_m"] >= 64:
        assert kernel["wgmma"], "Hopper's instruction wgmma is not used"
    (loop,), (waits,) = kernel["loops"], kernel["waits"]
    assert len(loop["buffers"]) == 2, "one for rows, one for weights"
    assert min(loop["buffers"]) >= kernel["num_stages"] - 1
    assert min(loop["waits"]) >= 2 * (kernel["num_stages"] - 2)
    assert sorted(waits) == sorted(loop["waits"]), "PTX differs from Triton's dialect"
    if capability == 90 and kernel["block_m"] == 16:
        assert 5 * (kernel["shared_bytes"] + SYSTEM_BYTES) <= SHARED_BYTES[90] + SYSTEM_BYTES
        assert 5 * kernel["registers"] * 32 * kernel["num_warps"] <= REGISTERS


def check_decodes(found: list[Kernel], capability: int) -> None:
    """Nothing spills, and dependent launches have loaded a tile before they wait."""
    check(found, capability)
    for kernel in found:
        threads = 32 * kernel["num_warps"]
        programs = 4 if kernel["kernel"] == "multiply_single_row" else 2
        if kernel.get("tokens", 1) > 1:
            programs = 1 if kernel["num_warps"] > 4 else 2
            assert kernel["mma"] or kernel["wgmma"] or kernel["tcgen05"]
        assert programs * kernel["registers"] * threads <= REGISTERS
        if capability < 90 or kernel["early_loads"] is None:
            assert capability < 90 or kernel.get("splits") == 1
            continue
        if kernel["kernel"] == "multiply_single_row":
            tile = kernel["block_n"] * kernel["block_k"]
            assert kernel["early_loads"] == tile // (LOADED * threads)
        else:
            _, _, dim = kernel["shape"]
            assert kernel["early_loads"] >= 2 * kernel["tile"] * dim // (LOADED * threads)


def check_few_rows(found: list[Kernel], capability: int) -> None:
    """Nothing spills, tensor cores multiply rows of halves, two programs or more fit on a
    multiprocessor, an iteration is loaded while others are in flight, and dependent launches have
    begun to load weights before they wait."""
    check(found, capability)
    for kernel in found:
        threads = 32 * kernel["num_warps"]
        assert 2 * kernel["registers"] * threads <= REGISTERS
        if capability >= 90:
            assert kernel["loads_before_wait"]
        if kernel["dtype"] == "torch.float32":
            continue
        assert kernel["mma"]
        if capability != 80:  # it has room for one
            assert 2 * (kernel["shared_bytes"] + SYSTEM_BYTES) <= SHARED_BYTES[capability]
        for loop, waits in zip(kernel["loops"], kernel["waits"], strict=True):
            assert min(loop["buffers"]) >= kernel["num_stages"] - 1
            # The weights and the rows, in halves; codes of 4 bits are loaded once for both halves.
            loads_an_iteration = 3 if "packed" in kernel else 4
            in_flight = (kernel["num_stages"] - 2) * loads_an_iteration
            assert min(waits) >= in_flight, "it waits for loads of later iterations"
        if "packed" in kernel:
            assert not kernel["contractions"], "an operation of unpacking is not rounded"
        elif capability >= 90:
            tile = kernel["block_n"] * 2 * kernel["depth"] * kernel["num_warps"]
            assert kernel["early_loads"] >= tile // (LOADED * threads)


def check_packed_rows(found: list[Kernel], capability: int) -> None:
    """Nothing spills, each operation of unpacking is rounded by itself, two programs or more fit on
    a multiprocessor, and dependent launches have begun to load before they wait."""
    check(found, capability)
    for kernel in found:
        assert not kernel["contractions"]
        assert 2 * kernel["registers"] * 32 * kernel["num_warps"] <= REGISTERS
        if capability >= 90:
            assert kernel["loads_before_wait"]


def check_float8(found: list[Kernel], capability: int) -> None:
    """Nothing spills in a loop but with heads of 512, loads are in flight as for other keys and
    values, and no key is read from shared memory byte by byte. From 8.9 on the hardware converts:
    two numbers at a time, and to bfloat16 by fast instructions."""
    (write,) = (kernel for kernel in found if kernel["kernel"] == "_rope_write")
    of_decodes = [kernel for kernel in found if kernel["kernel"] == "attend_decodes"]
    loading = [*of_decodes, *(kernel for kernel in found if kernel["kernel"] == "attend")]
    assert of_decodes
    assert (len(loading) > len(of_decodes)) == (capability < 100)
    assert not write["stack_bytes"]
    assert bool(write["to_float8"]) == (capability >= 89)
    for kernel in loading:
        print(kernel)
        _, _, dim = kernel["shape"]
        is_wide = kernel["kernel"] == "attend" and kernel["max_query_len"] > 1 and dim > 128
        assert kernel["has_float8"]
        if is_wide and dim > ONE_PROGRAM_BEYOND:
            assert kernel["spills_in_loops"] <= FLOAT8_SPILLS[capability]
        else:
            assert not kernel["spills_in_loops"]
        assert not kernel["slow_conversions"]
        if capability >= 90 or not is_wide:
            assert kernel["byte_loads"] <= MASK_LOADS
        assert bool(kernel["from_float8"]) == (capability >= 89)
        assert kernel["mma"] or kernel["wgmma"]
        if kernel["kernel"] == "attend":
            check_attention(kernel, capability)
            continue
        assert bool(kernel["to_float8"]) == (capability >= 89)
        threads = 32 * kernel["num_warps"]
        assert 2 * kernel["registers"] * threads <= REGISTERS
        if kernel["early_loads"] is not None:
            assert kernel["early_loads"] >= 2 * kernel["tile"] * dim // (2 * LOADED * threads)


@pytest.fixture(scope="module")
def compiled() -> list[Kernel]:
    """Some launches, compiled in one process, which takes seconds to start."""
    return launches(90, None, "some-rows", "some-attention")


@pytest.fixture(scope="module")
def more_compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    return launches(90, tmp_path_factory.mktemp("cache"), "some-latents", "some-packed")


def is_of_attention(kernel: Kernel) -> bool:
    return kernel["kernel"] in ("attend", "merge_splits") and "heads" not in kernel


def test_the_rows_kernels_compile(compiled: list[Kernel]) -> None:
    found = [k for k in compiled if not is_of_attention(k) and "kind" not in k and "heads" not in k]
    names = {kernel["kernel"] for kernel in found}
    assert {
        "_rms_norm",
        "_layer_norm",
        "_activate",
        "_rope_write",
        "_copy_rows",
        "_rope_tables",
    } <= names
    assert {"_convolve", "_delta_rule", "_gated_norm", "_scan", "_selective_scan"} <= names
    assert {"choose_tokens", "_top_scores", "_unpack_step"} <= names
    assert {"_route", "_sort_pairs", "_combine"} <= names
    assert {"_gate_and_up", "_up", "_down"} <= names
    assert {"_shrink", "_expand", "_shrink_pairs"} <= names
    check(found, 90)


def test_ranks_meet_with_the_memory_order_of_the_whole_system(compiled: list[Kernel]) -> None:
    """Each word is published behind the parts and read before them, and parts in 16 bytes."""
    found = [kernel for kernel in compiled if kernel["kernel"] in ("_sum_parts", "_meet")]
    assert len(found) == 12
    sizes = [kernel["releases"] for kernel in found]
    assert sizes == [2] * 6 + [8] * 6
    for kernel, size in zip(found, sizes, strict=True):
        waits = kernel["acquires"]
        assert waits in (0, 2 * size), "once at first, and in the loop"
        assert kernel["shared_bytes"] <= 128
    halves = [kernel for kernel in found if kernel["wide_loads"]]
    assert [kernel["wide_loads"] for kernel in halves] == [2, 2, 3, 8, 8, 9]


@pytest.mark.slow
def test_some_kernels_that_read_packed_weights_compile(more_compiled: list[Kernel]) -> None:
    found = [kernel for kernel in more_compiled if "kind" in kernel]
    assert {kernel["kernel"] for kernel in found} == {
        "_unpack_rows",
        "_linear",
        "_gate_and_up",
        "_down",
    }
    check(found, 90)


def test_some_attention_compiles_and_loads_ahead(compiled: list[Kernel]) -> None:
    found = [kernel for kernel in compiled if is_of_attention(kernel)]
    names = [kernel["kernel"] for kernel in found]
    assert names == ["attend", "merge_splits", "attend", "attend", "attend", "attend"]
    assert [kernel["has_ends"] for kernel in found] == [False] * 3 + [True] * 2 + [False]
    check(found, 90)


@pytest.mark.slow
def test_latent_attention_compiles_and_loads_ahead(more_compiled: list[Kernel]) -> None:
    found = [kernel for kernel in more_compiled if "heads" in kernel]
    assert {kernel["kernel"] for kernel in found} == {
        "_write_latents",
        "attend_latents",
        "merge_splits",
    }
    check(found, 90)


def test_the_kernels_of_a_decode_step_load_before_they_wait() -> None:
    found = launches(90, None, "some-decodes")
    few = [kernel for kernel in found if kernel["kernel"] == "multiply_few_rows"]
    packed = [kernel for kernel in found if "packed" in kernel and kernel not in few]
    others = [kernel for kernel in found if kernel not in packed + few]
    assert len(few) == 3
    check_few_rows(few, 90)
    assert {kernel["kernel"] for kernel in others} == {"attend_decodes", "multiply_single_row"}
    assert {kernel.get("tokens") for kernel in others} == {None, 1, 5}
    assert packed
    check_decodes(others, 90)
    check_packed_rows(packed, 90)


def test_float8_is_converted_by_the_hardware_while_loads_are_in_flight() -> None:
    check_float8(launches(90, None, "some-float8"), 90)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_all_attention_to_float8_compiles(capability: int, tmp_path: Path) -> None:
    check_float8(launches(capability, tmp_path, "all-float8"), capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_all_kernels_of_a_decode_step_load_before_they_wait(
    capability: int, tmp_path: Path
) -> None:
    check_decodes(launches(capability, tmp_path, "decodes"), capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_all_products_of_one_row_with_packed_weights_compile(
    capability: int, tmp_path: Path
) -> None:
    found = launches(capability, tmp_path, "all-packed-rows")
    assert {kernel["packed"] for kernel in found} == set(PACKINGS)
    check_packed_rows(found, capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_all_products_of_few_rows_compile(capability: int, tmp_path: Path) -> None:
    found = launches(capability, tmp_path, "all-few-rows")
    assert {kernel.get("packed") for kernel in found} == {None, *PACKINGS}
    check_few_rows(found, capability)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PACKINGS)
@pytest.mark.parametrize("capability", [80, 90])
def test_all_kernels_that_read_packed_weights_compile(
    capability: int, kind: str, tmp_path: Path
) -> None:
    found = launches(capability, tmp_path, f"packed={kind}")
    assert {kernel["kind"] for kernel in found} == {kind}
    check(found, capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_all_kernels_of_mixtures_load_ahead(capability: int, tmp_path: Path) -> None:
    found = launches(capability, tmp_path, "experts")
    assert {kernel["kernel"] for kernel in found if "experts" in kernel} == {
        "_gate_and_up",
        "_up",
        "_down",
    }
    check(found, capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_all_launches_compile(capability: int, tmp_path: Path) -> None:
    check(launches(capability, tmp_path, "rows", "all-attention"), capability)
