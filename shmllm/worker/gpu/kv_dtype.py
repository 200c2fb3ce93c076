"""What a GPU stores keys and values as: numbers of the model's dtype, or FP8.

FP8 is e4m3 with a scale of 1, as in vLLM without calibrated scales. This module owns the choice. It
must not know kernels or the layout of the cache.
"""

from __future__ import annotations

from pathlib import Path

import torch

from shmllm.config.load import LoadConfig
from shmllm.errors import EngineStartError
from shmllm.models.config_file import read_fields

FLOAT8 = torch.float8_e4m3fn
FLOAT8_NAME = "fp8"


def check_kv_dtype(load: LoadConfig, dtype: str) -> None:
    """Raise EngineStartError if a GPU cannot store keys and values as the options say.

    Args:
        load: the options.
        dtype: the dtype name of the weights.
    """
    wanted = load.kv_cache_dtype
    if not load.has_float8_cache and wanted not in ("auto", dtype):
        raise EngineStartError(
            f"kv_cache_dtype={wanted!r} is for the CPU: on a GPU keys and values have the dtype of "
            f"the weights, or {FLOAT8_NAME!r}"
        )


def kv_dtype(load: LoadConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of keys and values of a model that has weights of a dtype."""
    return FLOAT8 if load.has_float8_cache else dtype


def kv_dtype_name(load: LoadConfig, dtype: str) -> str:
    """Return the name of that dtype, for display and for the identity of shared blocks."""
    return FLOAT8_NAME if load.has_float8_cache else dtype


def unused_scales(load: LoadConfig) -> tuple[str, ...]:
    """Return a sentence if the checkpoint has scales of keys and values that are not used."""
    if not load.has_float8_cache:
        return ()
    fields = read_fields(Path(load.directory), load.overrides)
    if not fields.table("quantization_config").get("kv_cache_scheme"):
        return ()
    return (
        "the checkpoint's scales of keys and values are not used: they are stored in FP8 with a "
        "scale of 1",
    )
