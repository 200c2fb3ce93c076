"""Tests the kernels of adapters of experts under Triton's interpreter."""

from __future__ import annotations

from conformance.expert_lora_kernels import ExpertLoraConformance


class TestExpertLora(ExpertLoraConformance):
    pass
