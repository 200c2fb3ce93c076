"""Tests the kernels of mixtures of experts under Triton's interpreter."""

from __future__ import annotations

from conformance.expert_kernels import ExpertKernelsConformance


class TestExpertKernels(ExpertKernelsConformance):
    pass
