"""The sampler on a GPU; `pytest -m gpu`."""

from __future__ import annotations

from sampler_conformance import SamplerConformance


class TestSampler(SamplerConformance):
    pass
