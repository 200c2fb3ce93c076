"""GPTQ: 4 or 8 bits, packed along the inputs.

qweight    [in / numbers of a word, out] int32
qzeros     [groups, out / numbers of a word] int32: the zeros less 1; of gptq_v2 as they are
scales     [groups, out]
g_idx      [in] int32: the group of each input; its order is another if the quantizer chose one
"""

from __future__ import annotations

import torch
from torch import Tensor

from shmllm.models.checkpoint_formats.components import Components, Method, unpacked
from shmllm.models.checkpoint_formats.stored import GroupedMatrix
from shmllm.models.fields import Fields

BITS = (4, 8)
_ADDED = {"gptq": 1, "gptq_v2": 0}
_OVERRIDES = ("bits", "group_size", "desc_act", "sym")


def configure(fields: Fields) -> Gptq:
    return Gptq(fields)


class Gptq(Method):
    components = (".qweight", ".qzeros", ".scales", ".g_idx")

    def __init__(self, fields: Fields) -> None:
        self._bits = fields.integer("bits")
        if self._bits not in BITS:
            raise fields.error(f"{self._bits} bits are not supported; supported: 4, 8")
        group = fields.integer("group_size", -1, minimum=-1)
        if group == 0:
            raise fields.error("'group_size' must not be 0")
        self._group = group if group > 0 else None
        self._ordered = not fields.flag("desc_act", False)
        form = fields.text("checkpoint_format", "gptq")
        if form not in _ADDED:
            raise fields.error(
                f"checkpoint_format {form!r} is not supported; supported: {', '.join(_ADDED)}"
            )
        self._added = _ADDED[form]
        for pattern, options in fields.table("dynamic").items():
            if isinstance(options, dict) and any(name in options for name in _OVERRIDES):
                raise fields.error(f"dynamic: other options for {pattern!r} are not supported")

    def main(self, dtype: str, name: str) -> str | None:
        return ".qweight" if name.endswith(".qweight") else None

    def shape(self, parts: Components) -> tuple[int, int]:
        num_words, rows = parts.header(".qweight", ("I32",), (None, None)).shape
        return rows, num_words * (32 // self._bits)

    def matrix(self, parts: Components) -> GroupedMatrix:
        rows, width = self.shape(parts)
        group = min(self._group or width, width)
        num_groups, bits = -(-width // group), self._bits
        scales = parts.scales(".scales", (num_groups, rows))
        words = parts.tensor(".qzeros", ("I32",), (num_groups, -(-rows * bits // 32)))
        zeros = unpacked(words, bits)[:, :rows].short() + self._added
        if bits == 8:
            zeros -= 128  # as from the numbers

        def numbers(main: Tensor, some: slice) -> Tensor:
            found = unpacked(main[:, some].t(), bits)
            return found if bits == 4 else (found ^ 128).view(torch.int8)

        places = self._places(parts, width, num_groups)
        return GroupedMatrix(
            (rows, width),
            bits,
            group,
            numbers,
            scales.t().contiguous(),
            zeros.t().contiguous(),
            places,
        )

    def _places(self, parts: Components, width: int, num_groups: int) -> Tensor | None:
        if self._ordered and ".g_idx" not in parts:
            return None
        places = parts.tensor(".g_idx", ("I32", "I64"), (width,))
        if int(places.min()) < 0 or int(places.max()) >= num_groups:
            raise parts.error(".g_idx", f"names groups outside of 0 to {num_groups - 1}")
        return places
