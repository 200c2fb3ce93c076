"""The sampler on a GPU."""

from __future__ import annotations

from conformance.device_sampler import SamplerConformance


class TestSampler(SamplerConformance):
    pass
