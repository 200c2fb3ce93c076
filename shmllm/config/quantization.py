"""The values of the option ``quantization``: what is done to a checkpoint, or what it must be."""

from __future__ import annotations

from typing import Literal, get_args

Rounding = Literal["int8", "int4", "int4-g64"]
"""What matrices can be rounded to while they are loaded or updated."""

StoredMethodName = Literal[
    "auto-round",
    "awq",
    "auto_awq",
    "awq_marlin",
    "bitnet",
    "bitsandbytes",
    "compressed-tensors",
    "fbgemm_fp8",
    "fp8",
    "gguf",
    "gptq",
    "auto_gptq",
    "gptq_marlin",
    "modelopt",
    "modelopt_fp4",
    "mxfp4",
    "gpt_oss_mxfp4",
    "quark",
]
"""vLLM's and transformers' names for what a checkpoint is."""

Quantization = Literal[Rounding, StoredMethodName]

ROUNDINGS: tuple[str, ...] = get_args(Rounding)

STORED_METHODS: dict[StoredMethodName, str] = {
    "auto-round": "auto-round",
    "awq": "awq",
    "auto_awq": "awq",
    "awq_marlin": "awq",
    "bitnet": "bitnet",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fbgemm_fp8": "fbgemm_fp8",
    "fp8": "fp8",
    "gguf": "gguf",
    "gptq": "gptq",
    "auto_gptq": "gptq",
    "gptq_marlin": "gptq",
    "modelopt": "modelopt",
    "modelopt_fp4": "modelopt",
    "mxfp4": "mxfp4",
    "gpt_oss_mxfp4": "mxfp4",
    "quark": "quark",
}
"""The method of the checkpoint, ``quant_method`` of its config.json or "gguf", by vLLM's names: it
has a name for each of its kernels as well."""
