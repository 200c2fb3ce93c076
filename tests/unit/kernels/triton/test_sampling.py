"""The sampler's kernels, interpreted."""

from __future__ import annotations

from sampling_conformance import SamplingConformance


class TestSampling(SamplingConformance):
    pass
