"""compressed-tensors: integers of 4 or 8 bits in words or bytes, or numbers in the format e4m3.

    pack-quantized     weight_packed [out, words] int32: number + 8, or + 128, from the lowest bits
                       on; weight_shape; weight_zero_point [words, groups] int32, packed along the
                       outputs; weight_g_idx [in], the groups of inputs that are not in order
    int-quantized      weight [out, in] int8; weight_zero_point int8
    float-quantized    weight [out, in] float8_e4m3fn
    these              weight_scale [out, groups], [out, 1] or one number
    nvfp4-pack-...     weight_packed [out, in / 2] uint8, numbers in the format e2m1, the first of
                       two in the lower half; weight_scale [out, in / 16] float8_e4m3fn, which is
                       divided by weight_global_scale
    mxfp4-pack-...     the same numbers; weight_scale [out, in / 32] uint8, powers of two

Activations are not rounded, whatever the config says of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from shmllm.models.checkpoint_formats.components import FLOAT8, Components, Method, unpacked
from shmllm.models.checkpoint_formats.float4 import float4_shape, mxfp4_matrix, nvfp4_matrix
from shmllm.models.checkpoint_formats.float8 import float8_matrix, float8_shape
from shmllm.models.checkpoint_formats.stored import GroupedMatrix, StoredMatrix
from shmllm.models.fields import Fields

PACKED, INTEGER, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
NVFP4, MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
FORMATS = (PACKED, INTEGER, FLOAT, NVFP4, MXFP4, "naive-quantized", "mixed-precision", "dense")
_OF_INTEGERS = ("tensor", "channel", "group")
STRATEGIES = {
    ("int", 4): _OF_INTEGERS,
    ("int", 8): _OF_INTEGERS,
    ("float", 8): ("tensor", "channel", "block"),
    ("float", 4): ("tensor_group", "group"),
}
"""By the type and the bits of elements."""
_FLOAT4_GROUPS = {("tensor_group", 16): NVFP4, ("group", 32): MXFP4}
_LAYERS = ("Linear",)  # the classes of modules that a target can name


def configure(fields: Fields) -> CompressedTensors:
    return CompressedTensors(fields)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of some modules are quantized.

    Attributes:
        targets: the modules: names, "re:" and a pattern, or classes.
        bits: of an element.
        is_float: whether these are floating numbers.
        symmetric: whether there are no zeros.
        group: the elements that share a scale; None: a row, or all.
        block: the rows and columns that do, or None.
        float4: NVFP4 or MXFP4, or None.
    """

    targets: tuple[str, ...]
    bits: int
    is_float: bool
    symmetric: bool
    group: int | None
    block: tuple[int, int] | None
    float4: str | None


class CompressedTensors(Method):
    components = (
        ".weight_packed",
        ".weight_scale",
        ".weight_global_scale",
        ".input_global_scale",
        ".weight_zero_point",
        ".weight_shape",
        ".weight_g_idx",
        ".input_scale",
        ".input_zero_point",
        ".output_scale",
        ".output_zero_point",
        ".k_scale",
        ".v_scale",
        ".q_scale",
    )

    def __init__(self, fields: Fields) -> None:
        _check_format(fields)
        for name in ("transform_config", "sparsity_config"):
            table = fields.table(name)
            if table.get("config_groups") or table.get("format", "dense") != "dense":
                raise fields.error(f"{name} is not supported")
        self._ignored = _names(fields, "ignore")
        groups = fields.table("config_groups")
        self._schemes = [
            _scheme(Fields(group, f"{fields.where}: {name}"))
            for name, group in groups.items()
            if isinstance(group, dict) and group.get("weights") is not None
        ]

    def main(self, dtype: str, name: str) -> str | None:
        if name.endswith(".weight_packed"):
            return ".weight_packed"
        return ".weight" if dtype in (FLOAT8, "I8") and name.endswith(".weight") else None

    def shape(self, parts: Components) -> tuple[int, int]:
        scheme = self._scheme_of(parts)
        if scheme.float4 is not None:
            return float4_shape(parts, ".weight_packed")
        if scheme.is_float:
            return float8_shape(parts)
        if ".weight_packed" not in parts:
            rows, width = parts.header(".weight", ("I8",), (None, None)).shape
            return rows, width
        rows, width = parts.tensor(".weight_shape", ("I64", "I32"), (2,)).tolist()
        parts.header(".weight_packed", ("I32",), (rows, -(-width * scheme.bits // 32)))
        return rows, width

    def matrix(self, parts: Components) -> StoredMatrix:
        scheme = self._scheme_of(parts)
        if scheme.float4 == NVFP4:
            return nvfp4_matrix(parts, ".weight_packed", ".weight_global_scale", is_divisor=True)
        if scheme.float4 == MXFP4:
            return mxfp4_matrix(parts, ".weight_packed", ".weight_scale")
        if scheme.is_float:
            return float8_matrix(parts, ".weight_scale", scheme.block)
        rows, width = self.shape(parts)
        group = min(scheme.group or width, width)
        num_groups = -(-width // group)
        scales = _per_row(parts, ".weight_scale", parts.scales(".weight_scale"), rows, num_groups)
        is_packed = ".weight_packed" in parts
        bits = scheme.bits if is_packed else 8
        zeros = None if scheme.symmetric else _zeros(parts, bits, rows, num_groups)
        places = None
        if ".weight_g_idx" in parts:
            places = parts.tensor(".weight_g_idx", ("I32", "I64"), (width,))
            if int(places.min()) < 0 or int(places.max()) >= num_groups:
                raise parts.error(".weight_g_idx", f"names groups outside of 0 to {num_groups - 1}")

        def numbers(main: Tensor, some: slice) -> Tensor:
            if not is_packed:
                return main[some]
            found = unpacked(main[some], bits)[:, :width]
            return found if bits == 4 else (found ^ 128).view(torch.int8)

        return GroupedMatrix((rows, width), bits, group, numbers, scales, zeros, places)

    def _scheme_of(self, parts: Components) -> Scheme:
        main = ".weight_packed" if ".weight_packed" in parts else ".weight"
        if any(_matches(parts.module, target) for target in self._ignored):
            raise parts.error(main, "is quantized, although 'ignore' names its module")
        for by_class in (False, True):
            for scheme in self._schemes:
                for target in scheme.targets:
                    if target in _LAYERS if by_class else _matches(parts.module, target):
                        return scheme
        raise parts.error(main, "is quantized, but no group of 'config_groups' names its module")


def _matches(module: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return module == target


def _per_row(parts: Components, name: str, found: Tensor, rows: int, num_groups: int) -> Tensor:
    """Returns parameters [rows, groups]; a matrix or a row may have one for all."""
    if num_groups == 1 and found.numel() == 1:
        return found.view(1, 1).expand(rows, 1)
    if num_groups == 1 and found.shape == (rows,):
        return found.view(rows, 1)
    if found.shape != (rows, num_groups):
        raise parts.error(
            name, f"has shape {list(found.shape)}, it must have [{rows}, {num_groups}]"
        )
    return found


def _zeros(parts: Components, bits: int, rows: int, num_groups: int) -> Tensor:
    """Returns the zeros, [rows, groups] int16, as numbers are stored."""
    name = ".weight_zero_point"
    if ".weight_packed" not in parts:
        found = parts.tensor(name, ("I8",))
        return _per_row(parts, name, found, rows, num_groups).short()
    words = parts.tensor(name, ("I32",), (-(-rows * bits // 32), num_groups))
    zeros = unpacked(words.t(), bits)[:, :rows].t().short()
    return zeros if bits == 4 else zeros - 128


def _check_format(fields: Fields) -> None:
    form = fields.text("format", "dense")
    if form not in FORMATS:
        raise fields.error(f"format {form!r} is not supported; supported: {', '.join(FORMATS)}")


def _names(fields: Fields, name: str) -> tuple[str, ...]:
    value = fields.values.get(name) or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise fields.error(f"{name!r} must be names of modules, not {value!r}")
    for each in value:
        if each.startswith("re:"):
            try:
                re.compile(each.removeprefix("re:"))
            except re.error as problem:
                raise fields.error(f"{name!r} has a wrong pattern {each!r}: {problem}") from None
    return tuple(value)


def _scheme(fields: Fields) -> Scheme:
    _check_format(fields)
    weights = Fields(fields.table("weights"), f"{fields.where}: weights")
    bits, kind = weights.integer("num_bits", 8), weights.text("type", "int")
    if (kind, bits) not in STRATEGIES:
        raise weights.error(
            f"{bits} bits of type {kind!r} are not supported; supported: 4 and 8 bits of the types "
            "'int' and 'float'"
        )
    group = weights.values.get("group_size")
    strategy = weights.text("strategy", "tensor" if group is None else "group")
    if strategy not in STRATEGIES[kind, bits]:
        raise weights.error(
            f"strategy {strategy!r} is not supported for {bits} bits of type {kind!r}"
        )
    block = weights.values.get("block_structure") if strategy == "block" else None
    if strategy == "block" and not (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    ):
        raise weights.error(f"'block_structure' must be two sizes, not {block!r}")
    return Scheme(
        targets=_names(fields, "targets"),
        bits=bits,
        is_float=kind == "float",
        symmetric=weights.flag("symmetric", True),
        group=weights.integer("group_size") if strategy == "group" else None,
        block=None if block is None else (block[0], block[1]),
        float4=_float4(weights, strategy, group) if (kind, bits) == ("float", 4) else None,
    )


def _float4(weights: Fields, strategy: str, group: object) -> str:
    found = _FLOAT4_GROUPS.get((strategy, group)) if isinstance(group, int) else None
    if found is None:
        raise weights.error(
            f"4 bits of type 'float' in groups of {group} with strategy {strategy!r} are not "
            "supported; supported: 16 with 'tensor_group' (NVFP4), 32 with 'group' (MXFP4)"
        )
    return found
