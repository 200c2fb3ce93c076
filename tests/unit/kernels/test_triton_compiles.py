"""Every kernel launch compiles for GPUs and has the facts of its kernel (`support.kernel_facts`):
what fits on a multiprocessor, which instructions it uses, and that its loops load ahead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.decode_facts import (
    check_decoders,
    check_decodes,
    check_experts,
    check_few_rows,
    check_float8,
    check_many_rows,
    check_packed_rows,
)
from support.kernel_facts import SPILLED_BYTES, Kernel, check, name_of, resident_threads
from support.kernel_inventory import kernels

from shmllm_kernels.gpu.packings import PACKINGS

TESTS = Path(__file__).resolve().parents[2]
CAPABILITIES = (80, 90, 100)


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
    assert {
        "_convolve",
        "_short_convolution",
        "_delta_rule",
        "_gated_norm",
        "_scan",
        "_selective_scan",
    } <= names
    assert {"choose_tokens", "_top_scores", "_unpack_step"} <= names
    assert {"_route", "_sort_pairs", "_combine", "combine_single_row", "_take_identities"} <= names
    assert {"multiply_gate_and_up", "multiply_up", "multiply_down"} <= names
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
        "multiply_gate_and_up",
        "multiply_down",
        "multiply_packed_row",
        "combine_packed_row",
    }
    check(found, 90)


def test_some_attention_compiles_and_loads_ahead(compiled: list[Kernel]) -> None:
    found = [kernel for kernel in compiled if is_of_attention(kernel)]
    names = [kernel["kernel"] for kernel in found]
    assert names == ["attend", "merge_splits", "attend"]
    check(found, 90)


@pytest.mark.slow
def test_latent_attention_compiles_and_loads_ahead(more_compiled: list[Kernel]) -> None:
    found = [kernel for kernel in more_compiled if "heads" in kernel]
    assert {kernel["kernel"] for kernel in found} == {
        "_absorb_queries",
        "_choose_blocks",
        "_choose_tokens",
        "_compress",
        "_list_keys",
        "_project_values",
        "_rotate_heads",
        "_score_index_blocks",
        "_score_index_keys",
        "_store_index_keys",
        "_store_keys",
        "_store_rows",
        "_write_latents",
        "attend_latents",
        "merge_splits",
    }
    check(found, 90)


def test_the_kernels_of_a_decode_step_load_before_they_wait() -> None:
    found = launches(90, None, "some-decodes")
    few = [kernel for kernel in found if kernel["kernel"] == "multiply_few_rows"]
    packed = [kernel for kernel in found if "packed" in kernel and kernel not in few]
    many = [kernel for kernel in found if kernel["kernel"] == "multiply_many_rows"]
    others = [kernel for kernel in found if kernel not in packed + few + many]
    assert [kernel["is_gated"] for kernel in many] == [True, False]
    check_many_rows(many, 90)
    assert len(few) == 3
    check_few_rows(few, 90)
    assert {kernel["kernel"] for kernel in others} == {"attend_decodes", "multiply_single_row"}
    assert {kernel.get("tokens") for kernel in others} == {None, 1, 5}
    assert packed
    check_decodes(others, 90)
    check_packed_rows(packed, 90)


@pytest.mark.slow
def test_float8_is_converted_by_the_hardware_while_loads_are_in_flight() -> None:
    check_float8(launches(90, None, "some-float8"), 90)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_attention_to_float8_compiles(capability: int, tmp_path: Path) -> None:
    check_float8(launches(capability, tmp_path, "all-float8"), capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_kernels_of_a_decode_step_load_before_they_wait(
    capability: int, tmp_path: Path
) -> None:
    check_decodes(launches(capability, tmp_path, "decodes"), capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_products_of_one_row_with_packed_weights_compile(
    capability: int, tmp_path: Path
) -> None:
    found = launches(capability, tmp_path, "all-packed-rows")
    assert {kernel["packed"] for kernel in found} == set(PACKINGS)
    check_packed_rows(found, capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_products_of_few_rows_compile(capability: int, tmp_path: Path) -> None:
    found = launches(capability, tmp_path, "all-few-rows")
    assert {kernel.get("packed") for kernel in found} == {None, *PACKINGS}
    check_few_rows(found, capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [each for each in CAPABILITIES if each >= 90])
def test_all_products_of_many_rows_compile(capability: int, tmp_path: Path) -> None:
    """Nobody launches them on 8.0, which has no tensor memory accelerator."""
    check_many_rows(launches(capability, tmp_path, "all-many-rows"), capability)


@pytest.mark.slow
def test_decodes_with_few_registers_spill_outside_of_their_loop_alone(tmp_path: Path) -> None:
    """So many programs fit on a multiprocessor, of four warps or of two."""
    found = launches(90, tmp_path, "limited-decodes")
    assert len(found) == 4
    for kernel in found:
        assert not kernel["spills_in_loops"]
        assert kernel["stack_bytes"] <= 2 * SPILLED_BYTES
        assert kernel["registers"] <= kernel["max_registers"]
        programs = resident_threads(kernel, 90) // kernel["threads"]
        assert programs == {96: 5, 128: 4}[kernel["max_registers"]] * 4 // kernel["num_warps"]


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_decoders_in_one_launch_compile(capability: int, tmp_path: Path) -> None:
    found = launches(capability, tmp_path, "all-decoders")
    decoders = [kernel for kernel in found if kernel["kernel"] == "decode_layers"]
    assert len(decoders) == 9
    check_decoders(decoders, capability)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PACKINGS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_kernels_that_read_packed_weights_compile(
    capability: int, kind: str, tmp_path: Path
) -> None:
    found = launches(capability, tmp_path, f"packed={kind}")
    assert {kernel["kind"] for kernel in found} == {kind}
    check(found, capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_kernels_of_mixtures_load_ahead(capability: int, tmp_path: Path) -> None:
    found = launches(capability, tmp_path, "experts")
    products = [kernel for kernel in found if "experts" in kernel]
    assert {kernel["kernel"] for kernel in products} == {
        "multiply_gate_and_up",
        "multiply_up",
        "multiply_down",
    }
    check(found, capability)
    for kernel in products:
        check_experts(kernel, capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_attention_compiles_and_loads_ahead(capability: int, tmp_path: Path) -> None:
    check(launches(capability, tmp_path, "all-attention", "all-latents"), capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_has_a_launch_and_its_facts(capability: int, tmp_path: Path) -> None:
    found = launches(
        capability,
        tmp_path,
        "rows",
        "some-attention",
        "some-latents",
        "some-packed",
        "some-decodes",
        "some-decoders",
    )
    missing = set() if capability >= 90 else {"many_rows_kernel.multiply_many_rows"}
    assert {name_of(kernel) for kernel in found} == kernels() - missing
    check(found, capability)
