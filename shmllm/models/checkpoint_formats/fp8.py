"""FP8: numbers in the format e4m3, with a scale for each block of rows and columns, or for all.

weight              [out, in] float8_e4m3fn
weight_scale_inv    [out / rows of a block, in / columns of a block]: what numbers are
                    multiplied by, in spite of the name
weight_scale        one number, or [out, 1], if the config has no ``weight_block_size``; with the
                    method ``fbgemm_fp8`` always [out, 1]

Files of DeepSeek V4 call the scales of blocks otherwise, and may have experts in MXFP4:

scale               as weight_scale_inv, or float8_e8m0fnu, powers of two
weight              [out, in / 2] int8: two codes of 4 bits each, the first one in the lower half
scale               [out, in / 32] float8_e8m0fnu
"""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.checkpoint_formats.components import FLOAT8, Components, Method
from shmllm.models.checkpoint_formats.float8 import float8_matrix, float8_shape
from shmllm.models.checkpoint_formats.stored import (
    Float8Matrix,
    NibbleMatrix,
    powers_of_runs,
)
from shmllm.models.fields import Fields

_PAIRS, _SCALE = "I8", ".scale"


class _PairMatrix(NibbleMatrix):
    """Those of DeepSeek V4, whose bytes are int8."""

    def packed(self, main: Tensor, some: slice) -> tuple[Tensor, Tensor]:
        return super().packed(main.view(torch.uint8), some)


def configure(fields: Fields) -> Fp8:
    return Fp8(fields)


class Fp8(Method):
    components = (
        ".weight_scale_inv",
        ".weight_scale",
        ".input_scale",
        ".input_scale_ub",
        ".activation_scale",
        ".k_scale",
        ".v_scale",
    )

    beside = (_SCALE,)

    def __init__(self, fields: Fields) -> None:
        form = fields.text("fmt", "e4m3")
        if form not in ("e4m3", "float8_e4m3fn"):
            raise fields.error(f"fmt {form!r} is not supported; supported: 'e4m3'")
        block = fields.values.get("weight_block_size")
        self._block: tuple[int, int] | None = None
        if block is not None:
            if not _is_block(block):
                raise fields.error(f"'weight_block_size' must be two sizes, not {block!r}")
            self._block = block[0], block[1]

    def main(self, dtype: str, name: str) -> str | None:
        return ".weight" if dtype in (FLOAT8, _PAIRS) and name.endswith(".weight") else None

    def shape(self, parts: Components) -> tuple[int, int]:
        header = parts.header(".weight", (FLOAT8, _PAIRS), (None, None))
        if header.dtype == FLOAT8:
            return float8_shape(parts)
        rows, width = header.shape
        return rows, 2 * width

    def matrix(self, parts: Components) -> Float8Matrix | NibbleMatrix:
        if parts.header(".weight", (FLOAT8, _PAIRS)).dtype == _PAIRS:
            rows, width = self.shape(parts)
            if width % 32:
                raise parts.error(".weight", f"has rows of {width} elements, no multiple of 32")
            powers = parts.powers(_SCALE, (rows, width // 32))
            return _PairMatrix("mxfp4", (rows, width), powers_of_runs(powers))
        if self._block is not None and _SCALE in parts:
            return float8_matrix(parts, _SCALE, self._block)
        if self._block is None:
            inverse = ".weight_scale_inv" in parts and ".weight_scale" not in parts
            return float8_matrix(parts, ".weight_scale_inv" if inverse else ".weight_scale")
        return float8_matrix(parts, ".weight_scale_inv", self._block)


def _is_block(block: object) -> bool:
    return (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and size > 0 for size in block)
    )
