"""Checked access to the metadata of a GGUF file that describe its architecture and its types."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

from shmllm.errors import EngineStartError
from shmllm.formats.gguf import GgufHeader, shown

_MIXTURES = {
    10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M",
    16: "Q5_K_S", 17: "Q5_K_M", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS",
    31: "IQ1_M",
}  # fmt: skip
"""The values of `general.file_type` that stand for several types of tensors."""


def quantization_of(header: GgufHeader) -> str:
    """How the weights are stored: llama.cpp's name of a mixture, such as Q4_K_M, or the type of
    most elements, such as Q4_1 or BF16."""
    number = header.metadata.get("general.file_type")
    if isinstance(number, int) and number in _MIXTURES:
        return _MIXTURES[number]
    counts: Counter[str] = Counter()
    for each in header.tensors.values():
        counts[each.type_name] += prod(each.shape)
    return max(counts, key=counts.__getitem__, default="")


class Metadata:
    """The metadata under an architecture's prefix, with checked types."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self._prefix = header.architecture

    def has_tensors(self, *endings: str) -> bool:
        """Whether any layer has a tensor whose name ends in one of these ways; layers may be of
        several kinds."""
        return any(name.endswith(endings) for name in self.header.tensors)

    def find(self, name: str) -> Any:
        """The value of PREFIX.name, or None."""
        return self.header.metadata.get(f"{self._prefix}.{name}")

    def whole(
        self,
        name: str,
        default: int | None = None,
        *,
        may_be_absent: bool = False,
        may_differ: bool = False,
    ) -> int:
        """A positive whole number, one for all layers. With `may_be_absent`, 0 stands for layers
        that have no such thing; with `may_differ`, it is that of the first layer."""
        value = self._found(name, default)
        if may_differ and isinstance(value, list):
            value = value[:1]
        if may_be_absent and isinstance(value, list):
            value = [each for each in value if each != 0] or 0
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._error(name, "one positive whole number for all layers", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._found(name, default)
        if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self._error(name, "a positive number", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self._found(name, default)
        if not isinstance(value, bool):
            raise self._error(name, "true or false", value)
        return value

    def _found(self, name: str, default: float | None) -> Any:
        value = self.find(name)
        return default if value is None else value

    def _error(self, name: str, wanted: str, value: Any) -> EngineStartError:
        found = "nothing" if value is None else shown(value)
        return self.header.error(f"{self._prefix}.{name} must be {wanted}, found {found}")
