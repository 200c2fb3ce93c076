"""A whole engine on a GPU."""

from __future__ import annotations

from conformance.gpu_engine import EngineConformance, _few_processors, model

__all__ = ["_few_processors", "model"]


class TestEngine(EngineConformance):
    pass
