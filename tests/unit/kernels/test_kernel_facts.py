"""The checks of compiled kernels fail for each fault that they look for."""

from __future__ import annotations

from typing import Any

import pytest
from support.compiled_code import (
    pipelines,
    spills_in_loops,
    spills_in_products,
    waits_in_loops,
)
from support.kernel_facts import SHARED_BYTES, check, resident_threads

LOOP: dict[str, Any] = {"buffers": [3, 3], "waits": [4]}
PRODUCT: dict[str, Any] = {
    "kernel": "multiply_down", "module": "experts_kernel", "dtype": "torch.bfloat16", "block_m": 64,
    "num_stages": 4, "threads": 128, "registers": 128, "shared_bytes": 50_000, "stack_bytes": 0,
    "spills_in_loops": 0, "is_double": False, "mma": 0, "wgmma": 0, "tcgen05": 8, "sums_stored": 1,
    "loops": [LOOP], "waits": [[4]],
}  # fmt: skip
ROW = PRODUCT | {
    "kernel": "_rms_norm",
    "module": "norm",
    "tcgen05": 0,
    "registers": 32,
    "loops": [],
}


def test_sound_kernels_pass() -> None:
    check([PRODUCT, ROW | {"shared_bytes": 32}], 100)
    check([PRODUCT | {"tcgen05": 0, "wgmma": 8, "sums_stored": 0}], 90)
    check([PRODUCT | {"tcgen05": 0, "mma": 8, "sums_stored": 0}], 80)
    check([PRODUCT | {"tcgen05": 0, "mma": 8, "block_m": 16}], 100)


@pytest.mark.parametrize(
    "fault",
    [
        {"is_double": True},
        {"stack_bytes": 8},
        {"spills_in_loops": 1},
        {"shared_bytes": SHARED_BYTES[100] + 1},
        {"mma": 8, "tcgen05": 0},
        {"wgmma": 8, "tcgen05": 0},
        {"sums_stored": 2},
        {"loops": [LOOP | {"buffers": [1, 3]}]},
        {"loops": [LOOP | {"waits": [4, 0]}]},
    ],
)
def test_a_fault_of_a_product_is_found(fault: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        check([PRODUCT | fault], 100)


@pytest.mark.parametrize("fault", [{"registers": 128}, {"shared_bytes": 100_000}, {"mma": 1}])
def test_a_fault_of_a_kernel_of_rows_is_found(fault: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        check([ROW | {"shared_bytes": 32} | fault], 100)


def test_a_multiprocessor_holds_what_its_registers_memory_and_threads_allow() -> None:
    kernel = {"threads": 128, "registers": 64, "shared_bytes": 0}
    assert resident_threads(kernel, 90) == 1024
    assert resident_threads(kernel | {"registers": 16}, 90) == 2048
    assert resident_threads(kernel | {"registers": 16, "threads": 32}, 90) == 1024
    assert resident_threads(kernel | {"shared_bytes": 56 * 1024}, 90) == 4 * 128
    assert resident_threads(kernel | {"shared_bytes": 49 * 1024}, 80) == 2 * 128


@pytest.mark.parametrize("product", ["tt.dot %x", "ttng.warp_group_dot %x", "ttng.tc_gen5_mma %x"])
def test_loops_with_products_are_found_in_the_dialect(product: str) -> None:
    copied = "ttg.local_alloc : () -> !ttg.memdesc<3x64x32xbf16, #shared, #smem, mutable>"
    ttgir = f"""
    %a = {copied}
    %b = {copied}
    scf.for %i = %0 to %n {{
      %t = ttg.async_wait %x {{num = 2 : i32}}
      %v = ttg.memdesc_index %a[%i]
      {product}
    }}
    scf.for %i = %0 to %n {{
      %v = ttg.memdesc_index %b[%i]
    }}
"""
    assert pipelines(ttgir) == [{"buffers": [3], "waits": [2]}]


@pytest.mark.parametrize("product", ["mma.sync.aligned", "wgmma.mma_async", "tcgen05.mma.cta"])
def test_the_waits_of_a_loop_count_once_however_often_it_branches_back(product: str) -> None:
    ptx = f"""
$L_0:
	cp.async.wait_group 5;
	@%p1 bra $L_0;
	{product} x;
	bra.uni $L_0;
$L_1:
	cp.async.wait_group 0;
	@%p2 bra $L_1;
"""
    assert waits_in_loops(ptx) == [[5]]


@pytest.mark.parametrize(("target", "spills"), [(0x10, 2), (0x30, 0), (0x50, 0)])
def test_a_spill_counts_between_an_address_and_a_later_branch_to_it(
    target: int, spills: int
) -> None:
    sass = f"""
        /*0000*/ STL [R1], R4 ;
        /*0010*/ STL.64 [R1], R4 ;
        /*0020*/ LDL.LU R4, [R1] ;
        /*0030*/ HMMA R4, R4 ;
        /*0040*/ @P0 BRA 0x{target:04x} ;
        /*0050*/ LDL R4, [R1] ;
"""
    assert spills_in_loops(sass) == spills


def test_spills_of_products_are_those_of_the_shortest_loop() -> None:
    """The other loops contain it, or come back to its middle from behind it."""
    sass = """
        /*0000*/ STL [R1], R4 ;
        /*0010*/ HGMMA R4, R4 ;
        /*0020*/ LDL R4, [R1] ;
        /*0030*/ @P0 BRA 0x0010 ;
        /*0040*/ LDL R4, [R1] ;
        /*0050*/ @P0 BRA 0x0000 ;
        /*0060*/ BRA 0x0010 ;
"""
    assert spills_in_products(sass) == 1
    assert spills_in_loops(sass) == 3
