"""Translates vLLM's options into the options of `LLM`.

This module handles None for vLLM's default, and other spellings of values. `LLM` decides which
options exist and handles those that shmllm does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DTYPES = {"half": "float16", "float": "float32"}

# Clients pass these even if they use no adapters, so they are ignored.
_LORA_OPTIONS = {"max_lora_rank", "max_loras", "max_cpu_loras", "lora_dtype"}


def translate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Translates options of vLLM's `LLM` or `EngineArgs`."""
    ours = {
        name: value
        for name, value in options.items()
        if value is not None and name not in _LORA_OPTIONS
    }
    if "model" in ours:
        ours["model"] = str(ours["model"])
    if "dtype" in ours:
        # A torch.dtype is written torch.float16.
        dtype = str(ours["dtype"]).removeprefix("torch.")
        ours["dtype"] = DTYPES.get(dtype, dtype)
    if ours.get("generation_config") == "vllm":
        ours["generation_config"] = "shmllm"
    return ours
