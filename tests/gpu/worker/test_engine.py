"""A whole engine on a GPU."""

from __future__ import annotations

from conformance.gpu_engine import EngineConformance, model

__all__ = ["model"]


class TestEngine(EngineConformance):
    pass
