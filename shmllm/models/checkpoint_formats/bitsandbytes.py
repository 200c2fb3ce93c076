"""bitsandbytes: 4 bits, numbers of a table (NF4, FP4), or 8 bits by row (LLM.int8).

    weight                              [out * in / 2, 1] uint8: two neighbours in a byte, the first
                                        one in its upper half
    weight.absmax                       the scale of each 64 elements, or other blocks: float32, or
                                        uint8, places in a table of its own
    weight.quant_map                    [16] float32: what 4 bits stand for
    weight.nested_absmax, _quant_map    the scales of blocks of scales, and their table [256]
    weight.quant_state.bitsandbytes__*  JSON in bytes: shape, block sizes, and what is added to
                                        scales that have a table
    weight, SCB                         of 8 bits: [out, in] int8; the largest magnitude of each row

Blocks go on over the ends of rows where the width is no multiple of them; such a matrix becomes
floating numbers, and so does FP4.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shmllm.errors import EngineStartError
from shmllm.models.checkpoint_formats.components import Components, Method
from shmllm.models.checkpoint_formats.stored import (
    FloatingMatrix,
    GroupedMatrix,
    NibbleMatrix,
    StoredMatrix,
)
from shmllm.models.codes import RUN
from shmllm.models.fields import Fields
from shmllm_kernels.code_tables import NF4

_WEIGHT = ".weight"
_STATES = tuple(f"{_WEIGHT}.quant_state.bitsandbytes__{name}" for name in ("nf4", "fp4"))
_LARGEST = 127


def configure(fields: Fields) -> BitsAndBytes:
    return BitsAndBytes(fields)


class BitsAndBytes(Method):
    components = (
        ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".SCB", ".weight_format",
        ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4",
    )  # fmt: skip

    def __init__(self, fields: Fields) -> None:
        storage = fields.text("bnb_4bit_quant_storage", "uint8")
        if storage != "uint8":
            raise fields.error(
                f"bnb_4bit_quant_storage {storage!r} is not supported; supported: 'uint8'"
            )

    def main(self, dtype: str, name: str) -> str | None:
        return _WEIGHT if dtype in ("U8", "I8") and name.endswith(_WEIGHT) else None

    def shape(self, parts: Components) -> tuple[int, int]:
        if parts.header(_WEIGHT, ("U8", "I8")).dtype == "I8":
            rows, width = parts.header(_WEIGHT, ("I8",), (None, None)).shape
            return rows, width
        return _shape(parts, _State(parts))

    def matrix(self, parts: Components) -> StoredMatrix:
        if parts.header(_WEIGHT, ("U8", "I8")).dtype == "I8":
            rows, width = self.shape(parts)
            scales = parts.scales(".SCB", (rows,)).float().view(rows, 1) / _LARGEST
            return GroupedMatrix((rows, width), 8, width, lambda main, some: main[some], scales)
        state = _State(parts)
        (rows, width), block = _shape(parts, state), state.size("blocksize")
        scales = _scales(parts, state, -(-rows * width // block))
        table = parts.tensor(f"{_WEIGHT}.quant_map", ("F32",), (16,))
        if width % block == 0 and block % RUN == 0 and torch.equal(table, torch.tensor(NF4)):
            of_runs = scales.view(rows, -1).repeat_interleave(block // RUN, 1)
            return NibbleMatrix("nf4", (rows, width), of_runs, high_first=True)

        def values(main: Tensor, some: slice) -> Tensor:
            places = torch.arange(some.start * width, some.stop * width)
            octets = main.flatten()[places // 2]
            codes = torch.where(places % 2 == 0, octets >> 4, octets & 15)
            return (table[codes.int()] * scales[places // block]).view(-1, width)

        return FloatingMatrix((rows, width), values)


class _State:
    """What the JSON of a weight of 4 bits says."""

    def __init__(self, parts: Components) -> None:
        self._parts = parts
        self._name = next((name for name in _STATES if name in parts), _STATES[0])
        content = bytes(parts.tensor(self._name, ("U8",), (None,)).tolist())
        try:
            found = json.loads(content)
        except ValueError:
            raise parts.error(self._name, "is no JSON") from None
        if not isinstance(found, dict):
            raise parts.error(self._name, "is no table")
        self.values: Mapping[str, Any] = found

    def error(self, field: str) -> EngineStartError:
        """Returns an error about a field; the caller raises it."""
        return self._parts.error(self._name, f"has a wrong {field}: {self.values.get(field)!r}")

    def size(self, field: str) -> int:
        value = self.values.get(field)
        if type(value) is not int or value <= 0:
            raise self.error(field)
        return value


def _shape(parts: Components, state: _State) -> tuple[int, int]:
    shape = state.values.get("shape")
    if not (
        isinstance(shape, list)
        and len(shape) == 2
        and all(type(size) is int and size > 0 for size in shape)
    ):
        raise state.error("shape")
    parts.header(_WEIGHT, ("U8",), (-(-shape[0] * shape[1] // 2), 1))
    return shape[0], shape[1]


def _scales(parts: Components, state: _State, count: int) -> Tensor:
    """Returns the scales of all blocks, float32."""
    name = f"{_WEIGHT}.absmax"
    if parts.header(name, ("F32", "U8"), (count,)).dtype == "F32":
        return parts.scales(name)
    places = parts.tensor(name, ("U8",)).int()
    table = parts.scales(f"{_WEIGHT}.nested_quant_map", (256,)).float()
    block = state.size("nested_blocksize")
    nested = parts.scales(f"{_WEIGHT}.nested_absmax", (-(-count // block),)).float()
    offset = state.values.get("nested_offset")
    if not isinstance(offset, float | int):
        raise state.error("nested_offset")
    return table[places] * nested[torch.arange(count) // block] + offset
