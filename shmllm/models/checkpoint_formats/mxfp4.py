"""MXFP4 as gpt-oss has it: the experts' matrices, with a power of two for each 32 elements.

    gate_up_proj_blocks    [experts, out, in / 32, 16] uint8
    gate_up_proj_scales    [experts, out, in / 32] uint8

A weight is named as the tensor of floating numbers, [experts, in, out].
"""

from __future__ import annotations

from shmllm.models.checkpoint_formats.components import Components, Method
from shmllm.models.checkpoint_formats.stored import NibbleMatrix, powers_of_runs
from shmllm.models.fields import Fields


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

    def matrix(self, parts: Components) -> NibbleMatrix:
        num_experts, width, rows = self.shape(parts)
        powers = parts.powers("_scales", (num_experts, rows, width // 32))
        return NibbleMatrix("mxfp4", (num_experts, width, rows), powers_of_runs(powers), True)
