"""Tests the kernels of low-rank adapters under Triton's interpreter."""

from __future__ import annotations

from conformance.lora_kernels import LoraConformance


class TestLora(LoraConformance):
    pass
