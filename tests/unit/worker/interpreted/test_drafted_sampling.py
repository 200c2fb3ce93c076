"""Tests the sampler behind drafted tokens on the fake GPU."""

from __future__ import annotations

from conformance.drafted_sampling import DraftedSamplingConformance


class TestDraftedSampling(DraftedSamplingConformance):
    pass
