"""Tests adapters in a whole engine on a GPU."""

from __future__ import annotations

from conformance.gpu_lora import LoraEngineConformance, adapted

__all__ = ["adapted"]


class TestLoraEngine(LoraEngineConformance):
    pass
