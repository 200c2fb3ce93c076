"""A whole engine with FP8 keys and values, on a GPU."""

from __future__ import annotations

from conformance.gpu_float8 import Float8EngineConformance, model
from conformance.gpu_shared_kv import engines

__all__ = ["engines", "model"]


class TestFloat8(Float8EngineConformance):
    pass
