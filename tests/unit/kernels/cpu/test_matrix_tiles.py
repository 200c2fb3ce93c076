"""Products by tile instructions, emulated on any CPU; their machine code; and, where a CPU has AMX,
the same products by AMX."""

from __future__ import annotations

import platform
import re

import pytest
import torch
from llvmlite import binding
from support.cpu_kernels import NEEDS_BFLOAT16, NEEDS_INT8, guarded, run_kernel
from support.emulated_tiles import EMULATED_MULTIPLY
from support.packed_matrices import drawn_matrix, values_of
from support.variants import diagonal, slow
from torch import Tensor

from shmllm_kernels.cpu import Kernel, matrix_tiles, object_code, products
from shmllm_kernels.cpu.amx import FLAGS, HAS_AMX
from shmllm_kernels.cpu.products import DEPTH_AT_ONCE, DTYPES, ROWS_AT_ONCE
from shmllm_kernels.cpu.tile_rounding import TILED, row_bytes
from tests.unit.kernels.cpu import test_products
from tests.unit.kernels.cpu.test_products import ROUNDED, assert_close, quantized
from tests.unit.kernels.cpu.test_rounding import parts_of, rounded
from tests.unit.kernels.cpu.test_tile_rounding import digits_of, in_tiles

BFLOAT16, INT8 = ("bfloat16 tiles", "bfloat16", "bfloat16"), ("int8 tiles", "int8", "float32")
INT16 = "int16 tiles", "int8", "float32"
KINDS = [BFLOAT16, INT8, INT16]
ROWS = (1, 2, 15, 16, 17, 33, 128)
Kinds = tuple[str, str, str]
NEEDS_AMX = pytest.mark.skipif(not HAS_AMX, reason="the CPU lacks AMX, or Linux refuses it")
NEEDS_X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="LLVM has the host's code")


def weights(columns: int, k: int, kind: str) -> Tensor:
    """Random weights, after which nothing may read."""
    if kind == "int8":
        numbers = torch.randint(-127, 128, (columns, k), dtype=torch.int8)
    else:
        numbers = torch.randn(columns, k).bfloat16()
    memory = guarded(numbers.nbytes).view(numbers.dtype)
    return memory.view(columns, k).copy_(numbers)


def multiply(
    kinds: Kinds,
    x: Tensor,
    weight: Tensor,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    num_threads: int = 1,
    kernels: dict[Kinds, Kernel] = EMULATED_MULTIPLY,
) -> Tensor:
    """Rounds x and multiplies it; the output memory is NaN beforehand. Scales of int8 are 1 unless
    given."""
    (rows, k), columns = x.shape, len(weight)
    blocks, stride = in_tiles(x, kinds[0]), row_bytes(k, TILED[kinds[0]])
    out = torch.full((rows + 1, columns), float("nan"))
    if scale is None and kinds[1] == "int8":
        scale = torch.ones(columns)
    extras = [0 if extra is None else extra for extra in (scale, bias)]
    run_kernel(
        kernels[kinds], rows, blocks, stride, out, 4 * columns, weight, columns, k, *extras,
        num_threads=num_threads,
    )  # fmt: skip
    assert out[rows:].isnan().all(), "wrote after the last row"
    return out[:rows]


def exact_sums(integers: Tensor, weight: Tensor) -> Tensor:
    """The product of integers as the kernels define it: the exact sums, rounded."""
    return (integers.long() @ weight.long().T).float()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_changes_no_other(bad: float) -> None:
    x, weight = torch.randn(18, 70), weights(20, 70, "int8")
    scale = torch.rand(20)
    clean = multiply(INT8, x, weight, scale=scale)
    x[3, 60] = bad
    found = multiply(INT8, x, weight, scale=scale)
    assert not found[3].isfinite().any()
    keep = [row for row in range(18) if row != 3]
    assert torch.equal(found[keep], clean[keep])


SHAPES = diagonal([32, 64, 100, 576, 1100, 2500, 33, 5], [5, 16, 17, 48, 100, 1])


@pytest.mark.parametrize(("k", "columns"), SHAPES)
def test_bfloat16_equals_float64_and_a_row_has_the_same_bits_in_any_batch(
    k: int, columns: int
) -> None:
    x, weight = torch.randn(128, k), weights(columns, k, "bfloat16")
    whole = multiply(BFLOAT16, x, weight)
    assert_close(whole, x.bfloat16(), weight)
    for rows in ROWS:
        for num_threads in (1, 2):
            first = min(3, 128 - rows)
            found = multiply(
                BFLOAT16, x[first : first + rows].clone(), weight, num_threads=num_threads
            )
            assert torch.equal(found, whole[first : first + rows])


@pytest.mark.parametrize(("k", "columns"), SHAPES)
def test_int8_is_exact_in_any_batch(k: int, columns: int) -> None:
    x, weight, scale = torch.randn(128, k), weights(columns, k, "int8"), torch.rand(columns)
    integers, scales = parts_of(rounded(x, "int8"), k)
    expected = exact_sums(integers, weight) * scales[:, None] * scale
    for rows in ROWS:
        for num_threads in (1, 2):
            found = multiply(INT8, x[-rows:].clone(), weight, scale=scale, num_threads=num_threads)
            assert torch.equal(found, expected[-rows:])


@pytest.mark.parametrize(("k", "columns"), SHAPES)
def test_int16_is_exact_in_any_batch(k: int, columns: int) -> None:
    x, weight, scale = torch.randn(128, k), weights(columns, k, "int8"), torch.rand(columns)
    high, low, scales = digits_of(x)
    sums = exact_sums(high, weight) * 256 + exact_sums(low, weight)
    expected = sums * scales[:, None] * scale
    for rows in ROWS:
        for num_threads in (1, 2):
            found = multiply(INT16, x[-rows:].clone(), weight, scale=scale, num_threads=num_threads)
            assert torch.equal(found, expected[-rows:])
    exact = x.double() @ weight.double().T * scale.double()
    assert (expected - exact).abs().max() < 1e-4 * exact.abs().max()


@NEEDS_INT8
@pytest.mark.parametrize(("k", "columns"), [(5, 7), (576, 48), (DEPTH_AT_ONCE, 100)])
def test_int8_has_the_bits_of_dot_products_that_add_one_part(k: int, columns: int) -> None:
    x, weight = torch.randn(33, k), weights(columns, k, "int8")
    scale, bias = torch.rand(columns), torch.randn(columns)
    kernel = products.MULTIPLY["int8", "int8", "float32"]
    expected = test_products.multiply(kernel, rounded(x, "int8"), weight, scale=scale, bias=bias)
    assert torch.equal(multiply(INT8, x, weight, scale=scale, bias=bias), expected)


@NEEDS_BFLOAT16
@pytest.mark.parametrize(
    ("shape", "kind"),
    diagonal([(1, 40), (7, 5), (20, 64), (64, 100), (97, 1100), (50, 2112)], ROUNDED),
)
def test_packed_weights_equal_float64_in_any_batch(shape: tuple[int, int], kind: str) -> None:
    columns, k = shape
    kinds = "bfloat16 tiles", kind, "float16"
    x, matrix = torch.randn(33, k), quantized(columns, k, kinds)
    weight, scale = guarded(matrix.integers.nbytes), matrix.scales
    weight.copy_(matrix.integers.view(torch.uint8).flatten())
    shaped = weight.view(matrix.integers.dtype).view(matrix.integers.shape)
    whole = multiply(kinds, x, shaped, scale=scale)
    if kind == "int8":
        values = matrix.integers * scale.double()[:, None]
    else:
        matrix.dtype = torch.bfloat16
        values = matrix.clone()
    assert_close(whole, x.bfloat16(), values)
    for rows in (1, 16, 17):
        part = multiply(kinds, x[-rows:].clone(), shaped, scale=scale, num_threads=2)
        assert torch.equal(part, whole[-rows:])


@NEEDS_BFLOAT16
@pytest.mark.parametrize(
    "kind", ["q5_k", slow("q6_k"), slow("q5_1"), slow("fp8"), slow("w4z-g32-f16")]
)
def test_packed_weights_of_other_kinds_equal_float64(kind: str) -> None:
    x, matrix = torch.randn(17, 1280), drawn_matrix(37, 1280, kind)
    kinds = "bfloat16 tiles", kind, "float16"
    found = multiply(kinds, x, matrix.integers, scale=matrix.scales)
    assert_close(found, x.bfloat16(), values_of(matrix).bfloat16())


@pytest.mark.parametrize("kinds", KINDS)
def test_more_rows_than_one_piece_has(kinds: Kinds) -> None:
    x, weight = torch.randn(2 * ROWS_AT_ONCE + 7, 96), weights(100, 96, kinds[1])
    whole = multiply(kinds, x, weight, num_threads=2)
    for first in (0, ROWS_AT_ONCE - 1, 2 * ROWS_AT_ONCE):
        part = multiply(kinds, x[first : first + 5].clone(), weight)
        assert torch.equal(part, whole[first : first + 5])


@pytest.mark.parametrize("kinds", KINDS)
def test_a_column_has_the_same_bits_in_any_tile(kinds: Kinds) -> None:
    x, weight = torch.randn(19, 200), weights(96, 200, kinds[1])
    whole = multiply(kinds, x, weight)
    for first in (35, 61, 80, 95):
        assert torch.equal(multiply(kinds, x, weight[first:].clone()), whole[:, first:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_and_a_bias_are_applied_once(dtype: str) -> None:
    x, weight = torch.randn(37, 70), weights(53, 70, "int8")
    scale, bias = torch.rand(53) / 100, torch.randn(53).to(getattr(torch, dtype))
    integers, scales = parts_of(rounded(x, "int8"), 70)
    expected = exact_sums(integers, weight) * scales[:, None] * scale + bias.float()
    found = multiply(("int8 tiles", "int8", dtype), x, weight, scale=scale, bias=bias)
    assert torch.equal(found, expected)


def test_nan_changes_only_its_row_and_its_column() -> None:
    x, weight = torch.randn(18, 48), weights(64, 48, "bfloat16")
    clean = multiply(BFLOAT16, x, weight)
    x[3, 5], weight[40, 0] = float("nan"), float("nan")
    is_nan = torch.zeros(18, 64, dtype=torch.bool)
    is_nan[3], is_nan[:, 40] = True, True
    found = multiply(BFLOAT16, x, weight, num_threads=2)
    assert torch.equal(found.isnan(), is_nan)
    assert torch.equal(found[~is_nan], clean[~is_nan])


# machine code


def assembly(kernel: Kernel) -> str:
    """The code of a kernel for a CPU with AMX."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu="sapphirerapids", features=",".join(f"+{name}" for name in FLAGS.values()), opt=3
    )
    run = kernel._entries[1]
    return str(machine.emit_assembly(object_code._optimized([run], ["run"], machine)))


def loops_with(code: str, instruction: str) -> list[list[str]]:
    """The innermost loops that have an instruction: blocks that end with a jump to themselves."""
    found = []
    for block in re.split(r"\n(?=\.LBB)", code):
        label, _, body = block.partition(":")
        lines = [line.strip() for line in body.splitlines()]
        if any(line.startswith("j") and line.endswith(label) for line in lines):
            found.append(lines)
    return [lines for lines in found if any(line.startswith(instruction) for line in lines)]


@NEEDS_X86
@pytest.mark.parametrize(("kinds", "dot"), [(BFLOAT16, "tdpbf16ps"), (INT8, "tdpbssd")])
def test_the_code_for_amx_has_only_tile_instructions_in_its_loops(kinds: Kinds, dot: str) -> None:
    code = assembly(matrix_tiles.MULTIPLY[kinds])
    for instruction in ("ldtilecfg", "tilezero", "tileloadd", "tilestored", "tilerelease"):
        assert re.search(rf"\t{instruction}\b", code), instruction
    loops = loops_with(code, dot)
    tiles = [sorted(re.findall(rf"{dot}\s.*%tmm(\d)$", "\n".join(loop), re.M)) for loop in loops]
    assert {"".join(sorted(set(sums))) for sums in tiles} == {"0", "01", "02", "0123"}
    for loop, sums in zip(loops, tiles, strict=True):
        counts = {name: sum(line.startswith(name) for line in loop) for name in (dot, "tileloadd")}
        num_sums = len(set(sums))
        num_steps = counts[dot] // num_sums
        assert counts[dot] == num_steps * num_sums, "each step adds to each sum"
        assert counts["tileloadd"] == num_steps * {1: 2, 2: 3, 4: 4}[num_sums]
        assert not any(line.startswith(("tilestored", "tilezero", "call")) for line in loop)
        assert not any("(%rsp)" in line or "(%rbp)" in line for line in loop), "spills"


@NEEDS_X86
def test_the_code_stores_each_tile_of_sums_once() -> None:
    code = assembly(matrix_tiles.MULTIPLY[BFLOAT16])
    assert len(re.findall(r"\ttilestored\b", code)) == 4 + 2 + 2 + 1, "LLVM has spilled tiles"


# this CPU


@NEEDS_AMX
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize(("k", "columns"), SHAPES)
def test_amx_computes_what_the_emulation_computes(k: int, columns: int, kinds: Kinds) -> None:
    x, weight = torch.randn(128, k), weights(columns, k, kinds[1])
    whole = multiply(kinds, x, weight, kernels=matrix_tiles.MULTIPLY)
    emulated = multiply(kinds, x, weight)
    if kinds != BFLOAT16:
        assert torch.equal(whole, emulated)
    else:
        assert_close(whole, x.bfloat16(), weight)
        torch.testing.assert_close(whole, emulated, atol=1e-4, rtol=1e-5)
    for rows in ROWS:
        part = multiply(
            kinds, x[:rows].clone(), weight, kernels=matrix_tiles.MULTIPLY, num_threads=2
        )
        assert torch.equal(part, whole[:rows])
