"""The sampler, on the fake GPU."""

from __future__ import annotations

from conformance.device_sampler import SamplerConformance


class TestSampler(SamplerConformance):
    pass
