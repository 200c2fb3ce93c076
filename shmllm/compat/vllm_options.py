"""Translates vLLM's options into the options of `LLM`.

This module handles None for vLLM's default, other spellings of values, and configuration objects.
`LLM` decides which options exist and handles those that shmllm does not have.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from shmllm.compat.vllm_config import Settings

logger = logging.getLogger(__name__)

LARGEST = 128
DTYPES = {"half": "float16", "float": "float32"}
_SPELLINGS = {"generation_config": {"vllm": "shmllm"}, "load_format": {"hf": "auto"}}


def translate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Translates options of vLLM's `LLM` or `EngineArgs`."""
    plain = {name: _plain(value) for name, value in options.items()}
    ours = {name: value for name, value in plain.items() if value is not None}
    if "model" in ours:
        ours["model"] = str(ours["model"])
    if "dtype" in ours:
        # A torch.dtype is written torch.float16.
        dtype = str(ours["dtype"]).removeprefix("torch.")
        ours["dtype"] = DTYPES.get(dtype, dtype)
    if ours.get("block_size") == 2 * LARGEST:
        logger.warning(
            "block_size=%d becomes %d, the largest that shmllm has", ours["block_size"], LARGEST
        )
        ours["block_size"] = LARGEST
    for name, spellings in _SPELLINGS.items():
        value = ours.get(name)
        if isinstance(value, str) and value in spellings:
            ours[name] = spellings[value]
    return ours


def _plain(value: Any) -> Any:
    """A configuration object as a dict, and None for one that sets nothing."""
    return (dict(vars(value)) or None) if isinstance(value, Settings) else value
