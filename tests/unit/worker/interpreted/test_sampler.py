"""The sampler on a device, interpreted."""

from __future__ import annotations

from sampler_conformance import SamplerConformance


class TestSampler(SamplerConformance):
    pass
