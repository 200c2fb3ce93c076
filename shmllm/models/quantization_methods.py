"""The methods that checkpoints can be quantized by, by the ``quant_method`` of config.json.

A method is a module and a line here. This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from shmllm.models.fields import Fields

METHODS: dict[str, str] = {
    "auto-round": "auto_round",
    "awq": "awq",
    "bitnet": "bitnet",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed_tensors",
    "fbgemm_fp8": "fp8",
    "fp8": "fp8",
    "gptq": "gptq",
    "modelopt": "modelopt",
    "mxfp4": "mxfp4",
    "quark": "quark",
}
"""For each method its module in `shmllm.models.checkpoint_formats`."""


def quantization_fields(fields: Fields) -> Fields | None:
    """Returns the fields of ``quantization_config``; None: the checkpoint is not quantized.

    Args:
        fields: those of the language model.

    Raises:
        EngineStartError: the method is unknown.
    """
    values = fields.table("quantization_config")
    if not values:
        return None
    found = Fields(values, f"{fields.where}: quantization_config")
    method = found.values.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise found.error(
            f"quant_method {method!r} is not supported; supported: {', '.join(METHODS)}"
        )
    return found


def method_module(fields: Fields) -> ModuleType:
    """Returns the module of a method. It has ``configure(fields)``, which returns a
    `checkpoint_formats.components.Method`.

    Args:
        fields: what `quantization_fields` returned.
    """
    return import_module(f"shmllm.models.checkpoint_formats.{METHODS[fields.text('quant_method')]}")
