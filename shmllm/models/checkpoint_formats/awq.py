"""AWQ, the version for matrix products ("gemm"): 4 bits, packed along the outputs.

qweight    [in, out / 8] int32: bits 4 * i of a word have its output `ORDER[i]`
qzeros     [groups, out / 8] int32, likewise
scales     [groups, out]
"""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.checkpoint_formats.components import Components, Method, unpacked
from shmllm.models.checkpoint_formats.stored import GroupedMatrix
from shmllm.models.fields import Fields

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACES = torch.tensor(ORDER).argsort()


def configure(fields: Fields) -> Awq:
    return Awq(fields)


class Awq(Method):
    components = (".qweight", ".qzeros", ".scales")

    def __init__(self, fields: Fields) -> None:
        old = {"w_bit": "bits", "q_group_size": "group_size"}
        for name, meaning in old.items():
            fields.values.setdefault(meaning, fields.values.get(name))
        bits = fields.integer("bits", 4)
        if bits != 4:
            raise fields.error(f"{bits} bits are not supported; supported: 4")
        version = fields.text("version", "gemm")
        if version.lower() != "gemm":
            raise fields.error(f"version {version!r} is not supported; supported: 'gemm'")
        group = fields.integer("group_size", 128, minimum=-1)
        if group == 0:
            raise fields.error("'group_size' must not be 0")
        self._group = group if group > 0 else None

    def main(self, dtype: str, name: str) -> str | None:
        return ".qweight" if name.endswith(".qweight") else None

    def shape(self, parts: Components) -> tuple[int, int]:
        width, num_words = parts.header(".qweight", ("I32",), (None, None)).shape
        return num_words * 8, width

    def matrix(self, parts: Components) -> GroupedMatrix:
        rows, width = self.shape(parts)
        group = min(self._group or width, width)
        num_groups = -(-width // group)
        scales = parts.scales(".scales", (num_groups, rows)).t().contiguous()
        zeros = _columns(parts.tensor(".qzeros", ("I32",), (num_groups, rows // 8)))
        return GroupedMatrix(
            (rows, width), 4, group, _numbers, scales, zeros.t().contiguous().short()
        )


def _numbers(main: Tensor, some: slice) -> Tensor:
    first = some.start // 8
    columns = _columns(main[:, first : -(-some.stop // 8)])
    return columns[:, some.start - 8 * first : some.stop - 8 * first].t().contiguous()


def _columns(words: Tensor) -> Tensor:
    """Returns the numbers in words [rows, words] in their order, [rows, 8 * words] uint8."""
    numbers: Tensor = unpacked(words, 4).unflatten(1, (-1, 8))
    return numbers[..., _PLACES].flatten(1)
