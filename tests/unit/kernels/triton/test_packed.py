"""Tests the kernels that read packed weights under Triton's interpreter."""

from __future__ import annotations

from conformance.packed_kernels import PackedKernelsConformance


class TestPackedKernels(PackedKernelsConformance):
    pass
