"""vLLM's options as `LLM` takes them.

Owns what clients pass by habit: None for vLLM's default, and other spellings of a value.
Which options exist, and what becomes of those that shmllm has not, is decided in `LLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DTYPES = {"half": "float16", "float": "float32"}

# Sizes of what has no size here; clients pass them whether or not they want adapters.
_OF_LORA = {"max_lora_rank", "max_loras", "max_cpu_loras", "lora_dtype"}


def translate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of vLLM's `LLM` or `EngineArgs` as ours."""
    ours = {
        name: value for name, value in options.items() if value is not None and name not in _OF_LORA
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
