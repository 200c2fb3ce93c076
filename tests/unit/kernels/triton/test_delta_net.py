"""Tests the kernels of gated delta nets under Triton's interpreter."""

from __future__ import annotations

from conformance.delta_net_kernels import DeltaNetConformance


class TestDeltaNet(DeltaNetConformance):
    pass
