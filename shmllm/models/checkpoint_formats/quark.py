"""Quark (AMD): FP8 with a scale for a matrix, a row or a block.

    weight          [out, in] float8_e4m3fn
    weight_scale    one number, [out], or [out / rows of a block, in / columns of a block]

Activations are not rounded, nor are keys and values: their scales are not read.
"""

from __future__ import annotations

from typing import Any

from shmllm.models.checkpoint_formats.components import FLOAT8, Components, Method
from shmllm.models.checkpoint_formats.float8 import float8_matrix, float8_shape
from shmllm.models.checkpoint_formats.stored import Float8Matrix
from shmllm.models.fields import Fields

_PER_BLOCK = "per_block"
QSCHEMES = ("per_tensor", "per_channel", _PER_BLOCK)
_FORMAT = "real_quantized"


def configure(fields: Fields) -> Quark:
    return Quark(fields)


class Quark(Method):
    components = (".weight_scale", ".input_scale", ".output_scale", ".k_scale", ".v_scale")

    def __init__(self, fields: Fields) -> None:
        export = Fields(fields.table("export"), f"{fields.where}: export")
        if (form := export.text("weight_format", _FORMAT)) != _FORMAT:
            raise export.error(f"weight_format {form!r} is not supported; supported: {_FORMAT!r}")
        whole = _weights(fields, "global_quant_config")
        self._block = None if whole is None else _read_block(whole)
        for name in ("layer_quant_config", "layer_type_quant_config"):
            modules = Fields(fields.table(name), f"{fields.where}: {name}")
            own = [each for key in modules.values if (each := _weights(modules, key)) is not None]
            if any(_read_block(each) != self._block for each in own):
                raise modules.error("blocks that differ by module are not supported")

    def main(self, dtype: str, name: str) -> str | None:
        return ".weight" if dtype == FLOAT8 and name.endswith(".weight") else None

    def shape(self, parts: Components) -> tuple[int, int]:
        return float8_shape(parts)

    def matrix(self, parts: Components) -> Float8Matrix:
        return float8_matrix(parts, ".weight_scale", self._block)


def _weights(fields: Fields, name: str) -> Fields | None:
    """Returns how weights are quantized; None: they are not."""
    found = Fields(fields.table(name), f"{fields.where}: {name}")
    if found.values.get("weight") is None:
        return None
    weights = Fields(found.table("weight"), f"{found.where}: weight")
    if (dtype := weights.text("dtype")) != "fp8_e4m3":
        raise weights.error(f"dtype {dtype!r} is not supported; supported: 'fp8_e4m3'")
    if (scheme := weights.text("qscheme")) not in QSCHEMES:
        raise weights.error(
            f"qscheme {scheme!r} is not supported; supported: {', '.join(QSCHEMES)}"
        )
    return weights


def _read_block(weights: Fields) -> tuple[int, int] | None:
    if weights.values["qscheme"] != _PER_BLOCK:
        return None
    block: Any = weights.values.get("block_size")
    if not isinstance(block, list) or [type(size) for size in block] != [int, int]:
        raise weights.error(f"'block_size' must be two sizes, not {block!r}")
    return block[0], block[1]
