"""Tests the kernels of Mamba 1 of few tokens under Triton's interpreter."""

from __future__ import annotations

from conformance.few_mamba_kernels import FewMambaConformance


class TestFewMamba(FewMambaConformance):
    pass
