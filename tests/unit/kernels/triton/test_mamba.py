"""Tests the kernels of Mamba 1 and 2 under Triton's interpreter."""

from __future__ import annotations

from conformance.mamba_kernels import MambaConformance


class TestMamba(MambaConformance):
    pass
