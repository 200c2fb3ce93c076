"""MXFP4 as gpt-oss has it: the experts' matrices, with a power of two for each 32 elements.

    gate_up_proj_blocks    [experts, out, in / 32, 16] uint8
    gate_up_proj_scales    [experts, out, in / 32] uint8

A weight is named as the tensor of floating numbers, [experts, in, out].
"""

from __future__ import annotations

from shmllm.models.checkpoint_formats.components import Components, Method
from shmllm.models.checkpoint_formats.stored import Float4Matrix
from shmllm.models.fields import Fields

_NOT_FINITE = 255


def configure(fields: Fields) -> Mxfp4:
    return Mxfp4()


class Mxfp4(Method):
    components = ("_blocks", "_scales")
    weight = ""

    def main(self, dtype: str, name: str) -> str | None:
        return "_blocks" if name.endswith("_blocks") else None

    def shape(self, parts: Components) -> tuple[int, ...]:
        shape = parts.header("_blocks", ("U8",), (None, None, None, 16)).shape
        num_experts, rows, num_groups, _ = shape
        return num_experts, 32 * num_groups, rows

    def matrix(self, parts: Components) -> Float4Matrix:
        num_experts, width, rows = self.shape(parts)
        powers = parts.tensor("_scales", ("U8",), (num_experts, rows, width // 32))
        if bool((powers == _NOT_FINITE).any()):
            raise parts.error("_scales", "has scales that are not finite")
        return Float4Matrix((num_experts, width, rows), powers)
