"""Tests adapters in a whole engine on the fake GPU."""

from __future__ import annotations

from conformance.gpu_lora import LoraEngineConformance, adapted, adapted_experts

__all__ = ["adapted", "adapted_experts"]


class TestLoraEngine(LoraEngineConformance):
    pass
