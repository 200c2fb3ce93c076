"""What matrix products on a CPU round activations to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.cpu_kernels import NEEDS_INT8
from support.emulated_tiles import EMULATED_GATE_AND_UP, EMULATED_MULTIPLY

from shmllm.config.load import LoadConfig
from shmllm.errors import EngineStartError
from shmllm.models.experts import ExpertLinear, MoE
from shmllm.models.layers import Linear, Norm, Storage
from shmllm.models.matrices import QUANTIZATIONS, Matrix, MixedMatrix
from shmllm.models.mlp import MLP
from shmllm.models.packed import PACKINGS
from shmllm.models.specs import MLPSpec, MoESpec, NormSpec
from shmllm.worker.cpu import instructions, products
from shmllm.worker.cpu.instructions import DotProduct, activation_dtype, instruction_of
from shmllm.worker.cpu.norms import record_norm
from shmllm.worker.cpu.product_kernels import rounded_bytes
from shmllm.worker.cpu.products import Products
from shmllm_kernels.cpu import KernelProgram, word_of_float
from shmllm_kernels.cpu.arithmetic import INT8_INSTRUCTION
from shmllm_kernels.cpu.norms import SCALE

BFLOAT16, FLOAT32 = "bfloat16", "float32"
QUANTIZED = {**PACKINGS, **QUANTIZATIONS}


def chosen(dtype: str, wanted: str = "auto", quantization: str | None = None) -> str:
    load = LoadConfig("m", activation_dtype=wanted, quantization=quantization)
    return activation_dtype(load, dtype)


def has(monkeypatch: pytest.MonkeyPatch, *instruction_names: str) -> None:
    """Lets the CPU have these instructions only."""

    def limited(each: DotProduct) -> DotProduct:
        return each._replace(exists=each.instruction in instruction_names)

    found = {kind: limited(each) for kind, each in instructions.DOT_PRODUCTS.items()}
    monkeypatch.setattr(instructions, "DOT_PRODUCTS", found)
    monkeypatch.setattr(instructions, "INT16_IN_TILES", limited(instructions.INT16_IN_TILES))


def test_auto_rounds_where_the_cpu_and_the_weights_allow_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has(monkeypatch, "AVX512_BF16", INT8_INSTRUCTION)
    assert chosen(BFLOAT16) == "bfloat16"
    assert chosen(FLOAT32) == chosen("float16") == "float32"
    for quantization in QUANTIZATIONS:
        expected = "bfloat16" if quantization == "int8" else "int16"
        assert chosen(FLOAT32, quantization=quantization) == expected
        assert chosen(BFLOAT16, "float32", quantization) == "float32"
        assert chosen(FLOAT32, "int8", quantization) == "int8"
        assert chosen(FLOAT32, "bfloat16", quantization) == "bfloat16"
    assert chosen(BFLOAT16, "float32") == "float32"
    has(monkeypatch, "AVX512_BF16")
    assert chosen(BFLOAT16) == chosen(BFLOAT16, quantization="int4") == "bfloat16"
    has(monkeypatch)
    assert chosen(BFLOAT16) == chosen(BFLOAT16, quantization="int4") == "float32"


def test_weights_in_8_bits_get_16_bits_where_the_cpu_has_amx(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has(monkeypatch, "AVX512_BF16", INT8_INSTRUCTION, "AMX_INT8")
    assert chosen(BFLOAT16, quantization="int8") == "int16"
    assert chosen(BFLOAT16, quantization="int4") == "int16", "for the LM head"
    assert chosen(BFLOAT16) == "bfloat16"
    vectors = LoadConfig("m", quantization="int8", cpu_instructions="vectors")
    assert activation_dtype(vectors, BFLOAT16) == "bfloat16"
    for cpu_instructions, quantization, option in (
        ("vectors", "int8", "quantization='int4' or a checkpoint in 4 to 8 bits"),
        ("auto", "int4", "quantization='int8', or with cpu_instructions='vectors'"),
        ("auto", None, "quantization='int8'"),
    ):
        load = LoadConfig(
            "m", quantization=quantization, activation_dtype="int16",
            cpu_instructions=cpu_instructions,
        )  # fmt: skip
        with pytest.raises(EngineStartError, match=f"int16' is not possible: .*with {option}"):
            activation_dtype(load, BFLOAT16)


def test_weights_in_groups_get_16_bits_where_the_cpu_has_no_amx(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_packed(*kinds: str, dtype: str = BFLOAT16, by: str = "auto", asked: str = "auto") -> str:
        return activation_dtype(LoadConfig("m", dtype=asked, cpu_instructions=by), dtype, kinds)

    has(monkeypatch, "AVX512_BF16", INT8_INSTRUCTION)
    assert of_packed("q4_k", "q6_k") == of_packed("fp8", "int4-g64") == "int16"
    assert of_packed("fp8") == BFLOAT16
    for dtype in (FLOAT32, "float16"):
        assert of_packed("q4_k", dtype=dtype) == "int16"
        assert (
            of_packed("q4_k", dtype=dtype, asked=dtype) == of_packed("fp8", dtype=dtype) == FLOAT32
        )
    assert chosen(BFLOAT16, "int16", "int4") == "int16"
    has(monkeypatch, INT8_INSTRUCTION)
    assert of_packed("q4_k") == chosen(FLOAT32, quantization="int4") == "int16"
    has(monkeypatch, "AVX512_BF16", INT8_INSTRUCTION, "AMX_INT8")
    assert of_packed("q4_k") == BFLOAT16
    assert of_packed("q4_k", by="vectors") == "int16"
    assert of_packed("q4_k", dtype=FLOAT32) == FLOAT32


@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_experts_get_groups_if_both_of_their_matrices_do(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "HAS_BFLOAT16", True)
    moe = MoE(64, MoESpec(num_experts=3, top_k=2, inner=64), STORAGE)
    chosen_by = Products(KernelProgram(1), None, dtype)
    other = BFLOAT16 if dtype == "int16" else FLOAT32
    for kinds, expected in (
        (("q8_0", "int4"), (f"{dtype}-g32",) * 2),
        (("q8_0", "fp8"), (other, other)),
        (("int8", "int4"), (other, other)),
    ):
        made = [QUANTIZED[kind].make((3, 64, 64), torch.bfloat16, allocate) for kind in kinds]
        moe.gate_up_proj.weight, moe.down_proj.weight = made
        assert tuple(each[0] for each in chosen_by.expert_kinds(moe)) == expected
    in_tiles = Products(KernelProgram(1), None, "int16", uses_tiles=True)
    assert in_tiles.expert_kinds(moe)[1][0] == BFLOAT16


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_other_weights_beside_those_in_groups_get_what_the_cpu_has(
    has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "HAS_BFLOAT16", has_bfloat16)
    chosen_by = Products(KernelProgram(1), None, "int16")
    other = BFLOAT16 if has_bfloat16 else FLOAT32
    assert chosen_by.kinds(Linear(96, (64,), False, STORAGE).weight)[0] == other
    for kind, x_kind in (("int4", "int16-g32"), ("q6_k", "int16-g16"), ("fp8", other)):
        matrix = PACKINGS[kind].make((16, 256), torch.bfloat16, allocate)
        assert chosen_by.kinds(matrix)[0] == x_kind
        assert chosen_by.kinds(matrix, is_grouped=True)[0] == other
        assert chosen_by.kinds(matrix, is_exact=True)[0] == FLOAT32


def test_int16_by_tiles_is_for_weights_in_8_bits_and_bfloat16_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "HAS_BFLOAT16", True)
    chosen_by = Products(KernelProgram(1), None, "int16", uses_tiles=True)
    kinds = {}
    for name in ("int8", "int4"):
        matrix = QUANTIZATIONS[name].make((64, 96), torch.bfloat16, allocate)
        kinds[name] = chosen_by.kinds(matrix)[0]
        assert chosen_by.kinds(matrix, is_exact=True)[0] == FLOAT32
        assert chosen_by.kinds(matrix, is_grouped=True)[0] == BFLOAT16
        assert chosen_by.tiled_expert_kinds(matrix)[0] == "bfloat16 tiles"
    assert kinds == {"int8": "int16 tiles", "int4": "bfloat16 tiles"}
    assert chosen_by.kinds(Linear(96, (64,), False, STORAGE).weight)[0] == "bfloat16 tiles"


@pytest.mark.parametrize(
    ("dtype", "wanted", "quantization", "message"),
    [
        (FLOAT32, "bfloat16", None, "the weights are float32; start with dtype='bfloat16'"),
        (FLOAT32, "bfloat16", "int8", "this CPU has no AVX512_BF16"),
        (BFLOAT16, "int8", None, "the weights are bfloat16; start with quantization='int8'"),
        (BFLOAT16, "bfloat16", None, "this CPU has no AVX512_BF16"),
        (FLOAT32, "int8", "int8", f"this CPU has no {INT8_INSTRUCTION}"),
        (FLOAT32, "int8", "int4", f"this CPU has no {INT8_INSTRUCTION}"),
    ],
)
def test_what_is_not_possible_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    wanted: str,
    quantization: str | None,
    message: str,
) -> None:
    has(monkeypatch)
    with pytest.raises(EngineStartError, match=f"'{wanted}' is not possible: {message}"):
        chosen(dtype, wanted, quantization)


def test_packed_weights_of_a_checkpoint_decide_what_is_possible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has(monkeypatch, "AVX512_BF16", INT8_INSTRUCTION)
    for wanted in ("int8", "int16", "bfloat16"):
        load = LoadConfig("m", activation_dtype=wanted)
        assert activation_dtype(load, FLOAT32, {"q4_k", "q6_k"}) == wanted
    assert activation_dtype(LoadConfig("m", dtype=FLOAT32), FLOAT32, {"q4_k"}) == FLOAT32
    load = LoadConfig("m", activation_dtype="int8")
    with pytest.raises(EngineStartError, match=r"the weights are fp8; start with .* but FP8"):
        activation_dtype(load, BFLOAT16, {"fp8"})


def test_activations_in_8_bits_have_the_groups_of_packed_weights() -> None:
    program = KernelProgram(1)
    for uses_tiles in (False, True):
        chosen_by = Products(program, None, "int8", uses_tiles)
        for kind, x_kind in (("int4", "int8-g32"), ("int4-g64", "int8-g32"), ("q6_k", "int8-g16")):
            matrix = PACKINGS[kind].make((16, 256), torch.bfloat16, allocate)
            assert chosen_by.kinds(matrix) == (x_kind, kind, BFLOAT16)
            assert chosen_by.kinds(matrix, is_exact=True) == (FLOAT32, kind, BFLOAT16)
            assert chosen_by.kinds(matrix, is_grouped=True) == (FLOAT32, kind, BFLOAT16)


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


STORAGE = Storage(allocate, torch.bfloat16)


@NEEDS_INT8
@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_parts_whose_activations_have_different_kinds_in_turn_read_their_own(dtype: str) -> None:
    parts = [PACKINGS[kind].make((16, 256), torch.float32, allocate) for kind in ("q6_k", "q8_0")]
    parts.append(PACKINGS["q6_k"].make((16, 256), torch.float32, allocate))
    for part in parts:
        part.copy_(torch.randn(16, 256))
    linear, x, num_rows = Linear(256, (48,), False, STORAGE), torch.randn(20, 256), np.array([20])

    def product(weight: Matrix) -> torch.Tensor:
        linear.weight, program = weight, KernelProgram(1)
        rounded = torch.zeros(rounded_bytes(20, 256, dtype), dtype=torch.uint8)
        out = torch.empty(20, weight.shape[0])
        Products(program, rounded, dtype).record(num_rows.ctypes.data, x, linear, out)
        program.replay()
        return out

    assert torch.equal(product(MixedMatrix(parts)), torch.cat([*map(product, parts)], 1))


def test_tiles_are_for_rounded_activations_outside_of_experts() -> None:
    dense, experts = Linear(32, (16,), True, STORAGE), ExpertLinear(2, 32, (16,), True, STORAGE)
    program = KernelProgram(1)
    for uses_tiles, first in ((True, "bfloat16 tiles"), (False, BFLOAT16)):
        chosen_by = Products(program, None, BFLOAT16, uses_tiles)
        assert chosen_by.kinds(dense.weight) == (first, BFLOAT16, BFLOAT16)
        assert chosen_by.kinds(dense.weight, is_exact=True) == (FLOAT32, BFLOAT16, BFLOAT16)
        assert chosen_by.kinds(experts.weight, is_grouped=True) == (BFLOAT16,) * 3
        unrounded = Products(program, None, FLOAT32, uses_tiles)
        assert unrounded.kinds(dense.weight) == (FLOAT32, BFLOAT16, BFLOAT16)


@pytest.mark.parametrize("rows", [1, 20])
def test_a_product_by_tiles_is_recorded_with_its_rounding(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = {**products.MULTIPLY, **EMULATED_MULTIPLY}
    monkeypatch.setattr(products, "MULTIPLY", kernels)
    linear, x, out = Linear(70, (40,), True, STORAGE), torch.randn(20, 70), torch.zeros(20, 40)
    num_rows, program = np.array([rows]), KernelProgram(2)
    rounded = torch.full((rounded_bytes(20, 70, BFLOAT16),), 0xFF, dtype=torch.uint8)
    Products(program, rounded, BFLOAT16, uses_tiles=True).record(
        num_rows.ctypes.data, x, linear, out
    )
    program.replay()
    assert isinstance(linear.weight, torch.Tensor)
    assert linear.bias is not None
    expected = x.bfloat16().double() @ linear.weight.double().T + linear.bias.double()
    torch.testing.assert_close(out[:rows].double(), expected[:rows], atol=1e-4, rtol=1e-5)
    assert not out[rows:].any()


def test_tiles_are_used_where_they_are_and_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def uses(by: str, activations: str, quantization: str | None = None) -> bool:
        load = LoadConfig("m", cpu_instructions=by, quantization=quantization)
        return instructions.uses_tiles(load, activations)

    monkeypatch.setattr(instructions, "HAS_AMX", True)
    assert uses("auto", BFLOAT16)
    assert uses("tiles", "int8", "int8")
    assert not uses("auto", "int8", "int4"), "tiles add over a whole row"
    assert not uses("auto", FLOAT32)
    assert not uses("vectors", BFLOAT16)
    with pytest.raises(EngineStartError, match="not possible: AMX does not multiply float32"):
        uses("tiles", FLOAT32)
    monkeypatch.setattr(instructions, "HAS_AMX", False)
    assert not uses("auto", BFLOAT16)
    with pytest.raises(EngineStartError, match="not possible: this CPU has no AMX"):
        uses("tiles", BFLOAT16)


def test_instructions_have_their_names() -> None:
    assert instruction_of(BFLOAT16, uses_tiles=True) == "AMX_BF16"
    assert instruction_of(BFLOAT16, uses_tiles=False) == "AVX512_BF16"
    assert instruction_of("int8", uses_tiles=True) == "AMX_INT8"
    assert instruction_of("int8", uses_tiles=False) == INT8_INSTRUCTION
    assert instruction_of("int16", uses_tiles=False) == INT8_INSTRUCTION
    of_float32 = ("AVX512F", "AVX2", "AVX", "SSE2", "NEON")
    assert instruction_of(FLOAT32, uses_tiles=True) in of_float32


# what products by tiles share


def recorded_by_tiles(monkeypatch: pytest.MonkeyPatch) -> tuple[KernelProgram, Products]:
    """A program, and what records products by emulated tiles in it."""
    monkeypatch.setattr(products, "MULTIPLY", {**products.MULTIPLY, **EMULATED_MULTIPLY})
    monkeypatch.setattr(products.gated_tiles, "GATE_AND_UP", EMULATED_GATE_AND_UP)
    program = KernelProgram(2)
    rounded = torch.zeros(rounded_bytes(20, 96, BFLOAT16), dtype=torch.uint8)
    return program, Products(program, rounded, BFLOAT16, uses_tiles=True)


def test_products_of_the_same_rows_round_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    program, recorder = recorded_by_tiles(monkeypatch)
    first, second = (Linear(64, (width,), False, STORAGE) for width in (32, 48))
    x, others, num_rows = torch.randn(20, 64), torch.randn(20, 64), np.array([20])
    outs = [torch.zeros(20, width) for width in (32, 48, 32, 48)]
    count = num_rows.ctypes.data
    recorder.record(count, x, first, outs[0])
    recorder.record(count, x, second, outs[1])
    assert program.labels == ["round", "multiply 32x64", "multiply 48x64"]
    recorder.record(count, others, first, outs[2])
    recorder.record(count, x, second, outs[3])
    assert program.labels[3:] == ["round", "multiply 32x64", "round", "multiply 48x64"]
    program.replay()
    for out, linear, source in zip(outs, (first, second) * 2, (x, x, others, x), strict=True):
        assert isinstance(linear.weight, torch.Tensor)
        expected = source.bfloat16().double() @ linear.weight.double().T
        torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-5)


def test_rows_that_something_may_have_changed_are_rounded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, recorder = recorded_by_tiles(monkeypatch)
    linear, x, out = Linear(64, (64,), False, STORAGE), torch.randn(20, 64), torch.zeros(20, 64)
    num_rows = np.array([20])
    recorder.record(num_rows.ctypes.data, x, linear, out)
    operands = [num_rows.ctypes.data, x.data_ptr(), 64, word_of_float(2.0), 0]
    program.record(SCALE["float32"], operands, label="scale")
    recorder.record(num_rows.ctypes.data, x, linear, out)
    recorder.record(num_rows.ctypes.data, x, linear, x)  # in place
    recorder.record(num_rows.ctypes.data, x, linear, out)
    multiply = "multiply 64x64"
    assert program.labels == ["round", multiply, "scale", "round", multiply, multiply, "round",
                              multiply]  # fmt: skip


@pytest.mark.parametrize("rows", [1, 20])
def test_a_norm_rounds_for_the_product_that_reads_it(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, recorder = recorded_by_tiles(monkeypatch)
    linear, norm = Linear(64, (32,), False, STORAGE), Norm(64, NormSpec(), STORAGE)
    residual, num_rows = torch.randn(20, 64), np.array([rows])
    normed, out, expected = (torch.zeros(20, width) for width in (64, 32, 32))
    record_norm(program, num_rows.ctypes.data, None, residual, norm, normed)
    recorder.record(num_rows.ctypes.data, normed, linear, out)
    assert program.labels == ["rms_norm", "multiply 32x64"]
    plain = KernelProgram(1)
    recorder = Products(plain, recorder._rounded, BFLOAT16, uses_tiles=True)
    record_norm(plain, num_rows.ctypes.data, None, residual, norm, normed)
    plain.record(
        SCALE["float32"], [num_rows.ctypes.data, normed.data_ptr(), 64, word_of_float(1.0), 0]
    )
    recorder.record(num_rows.ctypes.data, normed, linear, expected)
    assert len(plain) == 4
    program.replay()
    plain.replay()
    assert torch.equal(out, expected)
    assert out[:rows].any()


MLPS = {
    "gated": (MLPSpec(inner=96), True),
    "not gated": (MLPSpec(inner=96, gated=False), False),
    "with biases": (MLPSpec(inner=96, bias=True), False),
    "of another width": (MLPSpec(inner=40), False),
    "of another activation": (MLPSpec(inner=96, activation="relu_squared"), False),
}


@pytest.mark.parametrize("name", MLPS)
def test_gate_up_and_activation_are_one_kernel_where_there_is_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, recorder = recorded_by_tiles(monkeypatch)
    spec, joins = MLPS[name]
    mlp = MLP(64, spec, STORAGE)
    assert recorder.joins(mlp) == joins
    assert not Products(program, None, BFLOAT16, uses_tiles=False).joins(mlp)
    if joins:
        x, out, num_rows = torch.randn(20, 64) / 8, torch.zeros(20, 64), np.array([20])
        activated = torch.zeros(20, spec.inner)
        recorder.record_gate_and_up(num_rows.ctypes.data, x, mlp, activated)
        recorder.record(num_rows.ctypes.data, activated, mlp.down_proj, out)
        assert program.labels == ["round", "gate_and_up 192x64", "multiply 64x96"]
        program.replay()
        gate_up, down = mlp.gate_up_proj.weight, mlp.down_proj.weight
        assert isinstance(gate_up, torch.Tensor)
        assert isinstance(down, torch.Tensor)
        gate, up = (x.bfloat16().double() @ gate_up.double().T).chunk(2, 1)
        inner = (torch.nn.functional.silu(gate) * up).float().bfloat16().double()
        expected = inner @ down.double().T
        torch.testing.assert_close(out.double(), expected, atol=0.05, rtol=0.01)
