"""By which instructions a CPU multiplies, and what options and weights make of activations."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from shmllm.config.load import LoadConfig
from shmllm.errors import EngineStartError
from shmllm.worker.cpu.product_kernels import MULTIPLY
from shmllm_kernels.cpu.amx import HAS_AMX
from shmllm_kernels.cpu.arithmetic import HAS_BFLOAT16, HAS_INT8, INT8_INSTRUCTION
from shmllm_kernels.cpu.group_rounding import GROUPINGS
from shmllm_kernels.cpu.simd import INSTRUCTIONS
from shmllm_kernels.cpu.tile_rounding import tiled


class DotProduct(NamedTuple):
    """What products of rounded activations need.

    weights: the dtypes and quantizations of weights that the products take.
    option: an option for such weights.
    instruction: what the CPU must have.
    exists: whether it has it.
    """

    weights: frozenset[str]
    option: str
    instruction: str
    exists: bool


def _weights_for(*x_kinds: str) -> frozenset[str]:
    return frozenset(weight for x, weight, _ in MULTIPLY if x in x_kinds)


def _in_groups(x_dtype: str) -> list[str]:
    return [name for name, grouping in GROUPINGS.items() if grouping.dtype == x_dtype]


DOT_PRODUCTS = {
    "bfloat16": DotProduct(
        _weights_for("bfloat16"), "dtype='bfloat16'", "AVX512_BF16", HAS_BFLOAT16
    ),
    "int8": DotProduct(
        _weights_for("int8", *_in_groups("int8")),
        "quantization='int8' or 'int4', or with a checkpoint in 4 to 8 bits but FP8",
        INT8_INSTRUCTION,
        HAS_INT8,
    ),
    "int16": DotProduct(
        _weights_for(*_in_groups("int16")),
        "quantization='int4' or a checkpoint in 4 to 8 bits but FP8",
        INT8_INSTRUCTION,
        HAS_INT8,
    ),
}
"""By the dtype name of activations."""
INT16_IN_TILES = DotProduct(
    _weights_for(tiled("int16")),
    "quantization='int8', or with cpu_instructions='vectors' for packed weights",
    "AMX_INT8",
    HAS_AMX,
)
"""What int16 needs where products use tiles."""

AMX_INSTRUCTIONS = {"bfloat16": "AMX_BF16", "int8": "AMX_INT8", "int16": "AMX_INT8"}
"""What replaces DOT_PRODUCTS, but for experts, if products use tiles."""


def uses_tiles(load: LoadConfig, activation_dtype: str) -> bool:
    """Return whether products use AMX.

    Args:
        load: the options.
        activation_dtype: the dtype name that products round activations to.

    Raises:
        EngineStartError: they cannot, although the options say so.
    """
    rounds = activation_dtype in ("bfloat16", "int16")
    rounds |= load.rounding == "int8" == activation_dtype
    if load.cpu_instructions != "tiles":
        return HAS_AMX and rounds and load.cpu_instructions == "auto"
    if not HAS_AMX:
        raise EngineStartError("cpu_instructions='tiles' is not possible: this CPU has no AMX")
    if not rounds:
        raise EngineStartError(
            f"cpu_instructions='tiles' is not possible: AMX does not multiply {activation_dtype} "
            "with these weights; start with dtype='bfloat16' or a quantization"
        )
    return True


def instruction_of(activation_dtype: str, uses_tiles: bool) -> str:
    """Return the name of the instructions that multiply activations of a dtype name.

    Args:
        activation_dtype: the dtype name.
        uses_tiles: as for `Products`.
    """
    if activation_dtype == "float32":
        return INSTRUCTIONS
    if uses_tiles:
        return AMX_INSTRUCTIONS[activation_dtype]
    return DOT_PRODUCTS[activation_dtype].instruction


def auto_dtype(checkpoint: str | None) -> str:
    """Return the meaning of dtype="auto" for the dtype name of a checkpoint.

    A checkpoint in bfloat16 stays so where the CPU multiplies that. All else is float32, in which
    greedy outputs equal those of transformers: docs/models.md has the figures.
    """
    is_fast = checkpoint == "bfloat16" and DOT_PRODUCTS["bfloat16"].exists
    return "bfloat16" if is_fast else "float32"


def activation_dtype(load: LoadConfig, dtype: str, packed: Collection[str] = ()) -> str:
    """Return the dtype name that products round activations to.

    Args:
        load: the options.
        dtype: the dtype name of the weights, unless these are quantized.
        packed: the kinds of the weights that the checkpoint has packed.

    Raises:
        EngineStartError: they cannot be rounded as asked.
    """
    wanted = load.activation_dtype
    stored = {load.rounding} if load.rounding else set(packed) or {dtype}
    in_tiles = INT16_IN_TILES.exists and load.cpu_instructions != "vectors"
    if wanted == "auto":  # 8 bits change too much to be the default
        if in_tiles and load.rounding:
            return "int16"  # for the LM head at least, which has 8 bits
        possible = ["bfloat16"] if load.rounding or dtype == "bfloat16" else []
        if not in_tiles and (possible or (packed and load.dtype == "auto")):
            possible.insert(0, "int16")
        fitting = (name for name in possible if _lacking(DOT_PRODUCTS[name], stored) is None)
        return next(fitting, "float32")
    if wanted == "float32":
        return wanted
    needed = INT16_IN_TILES if in_tiles and wanted == "int16" else DOT_PRODUCTS[wanted]
    lacking = _lacking(needed, stored)
    if lacking is not None:
        raise EngineStartError(f"activation_dtype={wanted!r} is not possible: {lacking}")
    return wanted


def _lacking(needed: DotProduct, stored: Collection[str]) -> str | None:
    """Return what dot products lack of weights of these kinds; None: nothing."""
    if needed.weights.isdisjoint(stored):
        names = ", ".join(sorted(map(str, stored)))
        return f"the weights are {names}; start with {needed.option}"
    return None if needed.exists else f"this CPU has no {needed.instruction}"
