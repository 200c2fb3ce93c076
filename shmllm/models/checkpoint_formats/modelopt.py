"""modelopt (NVIDIA's Model Optimizer): NVFP4, or FP8 with a scale for a matrix or a row.

    NVFP4    weight [out, in / 2] uint8, numbers in the format e2m1, the first of two in the lower
             half; weight_scale [out, in / 16] float8_e4m3fn, which is multiplied by weight_scale_2
    FP8      weight [out, in] float8_e4m3fn; weight_scale, one number or [out]

A checkpoint of MIXED_PRECISION has both; the dtype of a weight says which it is. Activations are
not rounded: input_scale is not read, nor are the scales of keys and values.
"""

from __future__ import annotations

from shmllm.models.checkpoint_formats.components import FLOAT8, Components, Method
from shmllm.models.checkpoint_formats.float4 import float4_shape, nvfp4_matrix
from shmllm.models.checkpoint_formats.float8 import float8_matrix, float8_shape
from shmllm.models.checkpoint_formats.stored import StoredMatrix
from shmllm.models.fields import Fields

_FLOAT4 = ("NVFP4", "W4A16_NVFP4")
ALGORITHMS = (*_FLOAT4, "FP8", "FP8_PER_CHANNEL_PER_TOKEN")
MIXED = "MIXED_PRECISION"
"""The algorithm of a checkpoint whose ``quantized_layers`` names one for each module."""
_GROUP = 16


def configure(fields: Fields) -> Modelopt:
    return Modelopt(fields)


class Modelopt(Method):
    components = (
        ".weight_scale", ".weight_scale_2", ".input_scale", ".pre_quant_scale", ".k_scale",
        ".v_scale", ".q_scale",
    )  # fmt: skip

    def __init__(self, fields: Fields) -> None:
        if fields.values.get("quant_algo") != MIXED:
            _check_algorithm(fields, (*ALGORITHMS, MIXED))
            return
        modules = Fields(fields.table("quantized_layers"), f"{fields.where}: quantized_layers")
        if not modules.values:
            raise fields.error(f"quant_algo {MIXED!r} needs 'quantized_layers'")
        different = {repr(modules.values[name]): name for name in modules.values}
        for name in different.values():
            _check_algorithm(Fields(modules.table(name), f"{modules.where}: {name}"), ALGORITHMS)

    def main(self, dtype: str, name: str) -> str | None:
        return ".weight" if dtype in ("U8", FLOAT8) and name.endswith(".weight") else None

    def shape(self, parts: Components) -> tuple[int, int]:
        if _is_float4(parts):
            return float4_shape(parts, ".weight")
        return float8_shape(parts)

    def matrix(self, parts: Components) -> StoredMatrix:
        if ".pre_quant_scale" in parts:
            raise parts.error(".pre_quant_scale", "is not supported (AWQ of modelopt)")
        if _is_float4(parts):
            return nvfp4_matrix(parts, ".weight", ".weight_scale_2", is_divisor=False)
        return float8_matrix(parts, ".weight_scale")


def _is_float4(parts: Components) -> bool:
    return parts.header(".weight", ("U8", FLOAT8)).dtype == "U8"


def _check_algorithm(fields: Fields, known: tuple[str, ...]) -> None:
    algorithm = fields.text("quant_algo", "")
    if algorithm not in known:
        raise fields.error(
            f"quant_algo {algorithm!r} is not supported; supported: {', '.join(known)}"
        )
    group = fields.values.get("group_size") or _GROUP
    if algorithm in _FLOAT4 and group != _GROUP:
        raise fields.error(f"group_size {group!r} is not supported; supported: {_GROUP}")
