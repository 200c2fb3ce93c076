"""The order in blocks of the KV cache, on the fake GPU."""

from __future__ import annotations

from conformance.gpu_cache_order import CacheOrderConformance
from conformance.gpu_program import _inference_mode, models

__all__ = ["_inference_mode", "models"]


class TestCacheOrder(CacheOrderConformance):
    pass
