"""Tests the sampler behind drafted tokens on a GPU."""

from __future__ import annotations

from conformance.drafted_sampling import DraftedSamplingConformance


class TestDraftedSampling(DraftedSamplingConformance):
    pass
