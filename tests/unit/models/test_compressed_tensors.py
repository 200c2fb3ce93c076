"""Values of compressed-tensors checkpoints, as the package of that name decompresses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.quantized_checkpoints import Weight as Stored
from support.quantized_checkpoints import config_group, named, read_weight, write_checkpoint

pytest.importorskip("compressed_tensors")
SHAPE = (48, 384)
MODULE = "model.layers.0.self_attn.o_proj"

PACKED, INTEGER, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
HALF, BF16, WIDE = torch.float16, torch.bfloat16, torch.float32


def case(
    form: str, bits: int, dtype: torch.dtype, kind: str | None, group: int = 0, **options: Any
) -> Any:
    """A format with a scale for each group, or for each row."""
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    if form == FLOAT:
        options["type"] = "float"
    return form, {"num_bits": bits} | strategy | options, dtype, kind


CASES = [
    case(PACKED, 4, HALF, "int4", 32),
    case(PACKED, 4, BF16, "w4-g64-bf16", 128),
    case(PACKED, 4, HALF, "int4-g64"),
    case(PACKED, 4, BF16, "w4z-g64-bf16", 128, symmetric=False),
    case(PACKED, 4, HALF, "w4z-g32-f16", 32, symmetric=False),
    case(PACKED, 4, HALF, "w4z-g64-f16", symmetric=False),
    case(PACKED, 4, HALF, "int4-g64", 64, actorder="weight"),
    case(PACKED, 8, BF16, "int8"),
    case(PACKED, 8, HALF, "q8_0", 32),
    case(PACKED, 8, HALF, None, 128, symmetric=False),
    case(INTEGER, 8, BF16, "int8"),
    case(INTEGER, 8, WIDE, "int8"),
    case(INTEGER, 8, WIDE, "int8", strategy="tensor"),
    case(FLOAT, 8, WIDE, "fp8", strategy="tensor"),
    case(FLOAT, 8, BF16, "fp8"),
    case(FLOAT, 8, WIDE, "fp8", strategy="block", block_structure=[16, 128]),
]


@pytest.mark.parametrize(("form", "weights", "dtype", "kind"), CASES)
def test_values_are_those_of_the_package(
    form: str, weights: dict[str, Any], dtype: torch.dtype, kind: str | None, tmp_path: Path
) -> None:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    torch.manual_seed(3)
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.randn(SHAPE).to(dtype) * 0.05
    low, high = extremes(weight, args)
    scale, zero = calculate_qparams(low, high, args)
    state = {"weight": weight, "weight_scale": scale.to(dtype), "weight_zero_point": zero}
    if weights.get("symmetric", True) and form != "pack-quantized":
        del state["weight_zero_point"]
    compressor = BaseCompressor.get_value_from_registry(form)
    parts = compressor.compress(state, scheme)
    parts = {f".{name}": tensor.contiguous() for name, tensor in parts.items()}
    expected = compressor.decompress({name[1:]: part for name, part in parts.items()}, scheme)
    stored = named(MODULE, Stored(parts, expected["weight"]))
    write_checkpoint(tmp_path, config_group(format=form, **weights), stored)
    found, values, _ = read_weight(tmp_path, f"{MODULE}.weight", dtype)
    assert found == kind
    assert torch.equal(values, expected["weight"])


def extremes(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest value of each group."""
    if args.strategy == "tensor":
        return weight.amin().view(1), weight.amax().view(1)
    if args.strategy == "block":
        rows, columns = args.block_structure
        blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
    return groups.amin(-1), groups.amax(-1)
