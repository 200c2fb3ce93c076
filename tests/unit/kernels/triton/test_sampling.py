"""The sampler's kernels, interpreted."""

from __future__ import annotations

from conformance.sampling_kernels import SamplingConformance


class TestSampling(SamplingConformance):
    pass
