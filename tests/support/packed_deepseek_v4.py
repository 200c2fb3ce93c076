"""Files of DeepSeek V4 as they are published: matrices in FP8, experts in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

IN_FLOAT8 = tuple(f".{name}.weight" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b"))
IN_FLOAT4 = tuple(f".w{number}.weight" for number in (1, 2, 3))
QUANTIZATION = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}


def _packed(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors as published files have them, and what transformers makes of these: experts in MXFP4,
    other projections but those to entries in FP8, with scales that are powers of two."""
    stored, values = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("tid2eid"):
            stored[name] = tensor.int()
        if "norm" in name or not name.endswith((*IN_FLOAT8, *IN_FLOAT4)) or "compressor" in name:
            continue
        if ".experts." in name:
            number = torch.randint(0, 256, (len(tensor), tensor.shape[1] // 2)).byte()
            number, scale = number.view(torch.int8), torch.randn(len(tensor), tensor.shape[1] // 32)
        else:
            number, scale = (tensor * 64).to(torch.float8_e4m3fn), torch.randn(1, 1)
        scale = (scale.abs() / 64).to(torch.float8_e8m0fnu)
        stored[name], stored[name.removesuffix("weight") + "scale"] = number, scale
        values[name] = Fp8Dequantize(None)._dequantize_one(number, scale, torch.float32)
    return stored, values


def pack_as_published(plain: Path, directory: Path) -> None:
    """Write a model that transformers has written as published files have it, and in its place what
    transformers makes of these."""
    directory.mkdir()
    stored, values = _packed(load_file(plain / "model.safetensors"))
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, directory / "model.safetensors")
    fields = json.loads((plain / "config.json").read_text())
    fields |= {"expert_dtype": "fp4", "quantization_config": QUANTIZATION}
    (directory / "config.json").write_text(json.dumps(fields))
