"""Tests the sampler's kernels under Triton's interpreter."""

from __future__ import annotations

from conformance.sampling_kernels import SamplingConformance


class TestSampling(SamplingConformance):
    pass
