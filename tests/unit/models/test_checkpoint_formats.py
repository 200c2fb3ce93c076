"""Quantized weights in safetensors files: the same values, packed where a kind can hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.quantized_checkpoints import (
    Weight,
    awq,
    bitsandbytes,
    bitsandbytes_8,
    config_group,
    fp8,
    gptq,
    int_quantized,
    mxfp4,
    mxfp4_rows,
    named,
    nvfp4,
    pack_quantized,
    read_weight,
    write_checkpoint,
)

from shmllm.models.checkpoint_formats.components import unpacked

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
MODULE = "model.layers.0.mlp.up_proj"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


def check(directory: Path, config: Any, weight: Weight, kind: str | None) -> None:
    """All of the ways to read a weight give its values."""
    write_checkpoint(directory, config, named(MODULE, weight))
    for dtype in (FLOAT, BF16, HALF):
        found, values, widened = read_weight(directory, f"{MODULE}.weight", dtype)
        assert found == kind
        assert torch.equal(widened, weight.values)
        assert torch.equal(values, weight.values.to(dtype))


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
WIDE = (48, 320)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "w4z-g32-f16"),
        ({"dtype": BF16}, "w4z-g32-bf16"),
        ({"symmetric": True}, "int4"),
        ({"symmetric": True, "group": 64}, "int4-g64"),
        ({"symmetric": True, "dtype": BF16}, "w4-g32-bf16"),
        ({"group": 128}, "w4z-g64-f16"),
        ({"group": 320}, "w4z-g64-f16"),
        ({"group": 96}, "w4z-g32-f16"),
        ({"group": 16}, None),
        ({"added": 0}, "w4z-g32-f16"),
        ({"shuffled": True}, None),
        ({"bits": 8, "symmetric": True}, "q8_0"),
        ({"bits": 8, "symmetric": True, "group": 128, "dtype": BF16}, "w8-g64-bf16"),
        ({"bits": 8, "symmetric": True, "group": 320}, "int8"),
        ({"bits": 8}, None),
        ({"dtype": FLOAT}, "w4z-g32-f32"),
    ],
)
def test_gptq(options: dict[str, Any], kind: str | None, tmp_path: Path) -> None:
    group = options.get("group", 32)
    config = GPTQ | {
        "bits": options.get("bits", 4),
        "group_size": -1 if group == 320 else group,
        "desc_act": options.get("shuffled", False),
        "checkpoint_format": "gptq" if options.get("added", 1) else "gptq_v2",
    }
    check(tmp_path, config, gptq(WIDE, **options), kind)


@pytest.mark.parametrize("width", [32, 40, 96, 200])
def test_rows_that_end_within_a_group_or_a_run(width: int, tmp_path: Path) -> None:
    check(tmp_path, GPTQ, gptq((24, width)), "w4z-g64-f16" if width == 32 else "w4z-g32-f16")


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


@pytest.mark.parametrize(
    ("options", "kind"),
    [({}, "w4z-g32-f16"), ({"group": 128}, "w4z-g64-f16"), ({"dtype": BF16}, "w4z-g32-bf16")],
)
def test_awq(options: dict[str, Any], kind: str, tmp_path: Path) -> None:
    check(tmp_path, AWQ | {"group_size": options.get("group", 32)}, awq(WIDE, **options), kind)


def test_awq_rows_are_read_in_pieces_of_any_size(tmp_path: Path) -> None:
    # 2 ** 18 // 6400 is not a multiple of the 8 rows of a word.
    check(tmp_path, AWQ | {"group_size": 64}, awq((88, 6400), 64), "w4z-g64-f16")


@pytest.mark.parametrize(
    ("block", "kind"),
    [(None, "fp8"), ((128, 128), "fp8"), ((1, 320), "fp8"), ((16, 32), None), ((16, 64), "fp8")],
)
@pytest.mark.parametrize("dtype", [FLOAT, BF16])
def test_fp8(
    block: tuple[int, int] | None, kind: str | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    if block is not None:
        config["weight_block_size"] = list(block)
    name = ".weight_scale" if block is None else ".weight_scale_inv"
    check(tmp_path, config, fp8((200, 320), block, name, dtype), kind)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "int4"),
        ({"group": 64}, "int4-g64"),
        ({"group": 128}, "int4-g64"),
        ({"group": None}, "int4-g64"),
        ({"dtype": BF16}, "w4-g32-bf16"),
        ({"dtype": BF16, "group": 128}, "w4-g64-bf16"),
        ({"symmetric": False}, "w4z-g32-f16"),
        ({"symmetric": False, "group": None, "dtype": BF16}, "w4z-g64-bf16"),
        ({"shuffled": True}, None),
        ({"dtype": FLOAT}, "w4-g32-f32"),
        ({"bits": 8, "group": None, "dtype": BF16}, "int8"),
        ({"bits": 8, "group": None, "dtype": FLOAT}, "int8"),
        ({"bits": 8}, "q8_0"),
        ({"bits": 8, "group": 128}, "w8-g64-f16"),
        ({"bits": 8, "dtype": BF16}, "w8-g32-bf16"),
        ({"bits": 8, "symmetric": False}, None),
    ],
)
def test_pack_quantized(options: dict[str, Any], kind: str | None, tmp_path: Path) -> None:
    group = options.get("group", 32)
    config = config_group(
        num_bits=options.get("bits", 4),
        symmetric=options.get("symmetric", True),
        strategy="channel" if group is None else "group",
        group_size=group,
    )
    check(tmp_path, config, pack_quantized(WIDE, **options), kind)


@pytest.mark.parametrize("width", [4, 20, 61, 63, 129])
def test_packed_rows_of_any_width(width: int, tmp_path: Path) -> None:
    config = config_group(num_bits=4, strategy="channel", symmetric=False)
    weight = pack_quantized((13, width), group=None, symmetric=False)
    check(tmp_path, config, weight, "w4z-g64-f16")


@pytest.mark.parametrize("dtype", [FLOAT, BF16, HALF])
def test_int_quantized(dtype: torch.dtype, tmp_path: Path) -> None:
    config = config_group(num_bits=8, strategy="channel", format="int-quantized")
    check(tmp_path, config, int_quantized(WIDE, dtype), "int8")


@pytest.mark.parametrize(
    ("strategy", "block"), [("tensor", None), ("channel", (1, 320)), ("block", (128, 128))]
)
def test_float_quantized(strategy: str, block: tuple[int, int] | None, tmp_path: Path) -> None:
    config = config_group(
        num_bits=8,
        type="float",
        strategy=strategy,
        block_structure=[128, 128] if strategy == "block" else None,
        format="float-quantized",
    )
    check(tmp_path, config, fp8((200, 320), block, ".weight_scale", BF16), "fp8")


@pytest.mark.parametrize("dtype", [BF16, HALF])
def test_wide_scales_are_kept_if_a_kind_can_hold_them(dtype: torch.dtype, tmp_path: Path) -> None:
    weight = pack_quantized(WIDE, dtype=dtype)
    weight.parts[".weight_scale"] = weight.parts[".weight_scale"].float()
    config = config_group(num_bits=4, strategy="group", group_size=32)
    check(tmp_path, config, weight, "int4" if dtype == HALF else "w4-g32-bf16")


def test_mxfp4(tmp_path: Path) -> None:
    weight, name = mxfp4(3, 24, 96), "model.layers.0.mlp.experts.gate_up_proj"
    write_checkpoint(tmp_path, {"quant_method": "mxfp4"}, named(name, weight))
    for dtype in (FLOAT, BF16):
        kind, values, widened = read_weight(tmp_path, name, dtype)
        assert kind == "mxfp4"
        assert torch.equal(widened, weight.values)
        assert torch.equal(values, weight.values.to(dtype))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (2, 2), (0, 3)])
def test_words_of_any_strides_are_unpacked_from_the_lowest_bits_on(
    bits: int, shape: tuple[int, int]
) -> None:
    """Zero points are packed by column, and a row of few of them is a transposed word."""
    words = torch.arange(1, 1 + 37 * shape[0] * shape[1], 37, dtype=torch.int32) * 7919
    words = words[: shape[0] * shape[1]].view(shape)
    for each in (words, words.t()):
        found = unpacked(each, bits)
        assert found.shape == (each.shape[0], each.shape[1] * 32 // bits)
        for row, numbers in zip(each.tolist(), found.tolist(), strict=True):
            mask = 2**bits - 1
            assert numbers == [word >> at & mask for word in row for at in range(0, 32, bits)]


FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True}


@pytest.mark.parametrize("width", [320, 208, 16])
@pytest.mark.parametrize("of_modelopt", [False, True])
def test_nvfp4(of_modelopt: bool, width: int, tmp_path: Path) -> None:
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    if not of_modelopt:
        config = config_group(
            **FLOAT4, strategy="tensor_group", group_size=16, format="nvfp4-pack-quantized"
        )
    check(tmp_path, config, nvfp4((24, width), of_modelopt), "nvfp4")


@pytest.mark.parametrize("width", [320, 96])
def test_mxfp4_of_compressed_tensors(width: int, tmp_path: Path) -> None:
    config = config_group(**FLOAT4, strategy="group", group_size=32, format="mxfp4-pack-quantized")
    check(tmp_path, config, mxfp4_rows((24, width)), "mxfp4")


@pytest.mark.parametrize(
    ("scheme", "block"), [("per_tensor", None), ("per_channel", (1, 320)), ("per_block", (16, 64))]
)
def test_quark(scheme: str, block: tuple[int, int] | None, tmp_path: Path) -> None:
    weights: dict[str, Any] = {"dtype": "fp8_e4m3", "qscheme": scheme}
    if scheme == "per_block":
        weights["block_size"] = list(block or ())
    keys = {"weight": weights, "output_tensors": {"dtype": "fp8_e4m3"}}
    method = {
        "quant_method": "quark",
        "export": {"weight_format": "real_quantized", "kv_cache_group": ["*k_proj"]},
        "global_quant_config": {"weight": weights, "input_tensors": None},
        "layer_quant_config": {"*k_proj": keys, "*router": {"weight": None}},
        "exclude": ["lm_head"],
    }
    check(tmp_path, method, fp8((48, 320), block, ".weight_scale"), "fp8")


def test_the_first_name_of_the_field(tmp_path: Path) -> None:
    config = config_group(num_bits=8, strategy="channel", format="int-quantized")
    weight = int_quantized(WIDE, BF16)
    check(tmp_path, config, weight, "int8")
    (tmp_path / "config.json").write_text(json.dumps({"compression_config": config}))
    found, values, _ = read_weight(tmp_path, f"{MODULE}.weight")
    assert found == "int8"
    assert torch.equal(values, weight.values)


@pytest.mark.parametrize(
    "method",
    [
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        {"producer": {"name": "modelopt"}, "quant_algo": "FP8", "kv_cache_scheme": "FP8"},
    ],
)
def test_fp8_by_rows_of_other_methods(method: dict[str, Any], tmp_path: Path) -> None:
    check(tmp_path, method, fp8((48, 320), (1, 320), ".weight_scale"), "fp8")


def test_fp8_of_modelopt_and_its_own_file(tmp_path: Path) -> None:
    weight = fp8((48, 320), None, ".weight_scale")
    check(tmp_path, {"quant_method": "modelopt", "quant_algo": "FP8"}, weight, "fp8")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}})
    )
    found, values, _ = read_weight(tmp_path, f"{MODULE}.weight")
    assert found == "fp8"
    assert torch.equal(values, weight.values)


@pytest.mark.parametrize(
    ("shape", "options", "kind"),
    [
        (WIDE, {}, "nf4"),
        (WIDE, {"nested": False}, "nf4"),
        ((48, 512), {"block": 128}, "nf4"),
        (WIDE, {"block": 128}, None),
        ((30, 100), {}, None),
        (WIDE, {"kind": "fp4"}, None),
    ],
)
def test_bitsandbytes(
    shape: tuple[int, int], options: dict[str, Any], kind: str | None, tmp_path: Path
) -> None:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    check(tmp_path, config, bitsandbytes(shape, **options), kind)


def test_eight_bits_of_bitsandbytes(tmp_path: Path) -> None:
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    check(tmp_path, config, bitsandbytes_8(WIDE), "int8")


@pytest.mark.parametrize(
    ("packing", "weight"),
    [("auto_gptq", gptq((48, 320), symmetric=True)), ("auto_awq", awq((48, 320)))],
)
def test_auto_round(packing: str, weight: Weight, tmp_path: Path) -> None:
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}
    kind = "int4" if packing == "auto_gptq" else "w4z-g32-f16"
    check(tmp_path, config | {"packing_format": f"auto_round:{packing}"}, weight, kind)
