"""Tests the kernels of mixtures of experts under Triton's interpreter."""

from __future__ import annotations

from conformance.expert_kernels import ExpertKernelsConformance
from conformance.few_routing_kernel import FewRoutingConformance
from conformance.identity_kernels import IdentityConformance
from conformance.left_out_kernels import LeftOutConformance


class TestExpertKernels(ExpertKernelsConformance):
    pass


class TestFewRouting(FewRoutingConformance):
    pass


class TestIdentities(IdentityConformance):
    pass


class TestLeftOut(LeftOutConformance):
    pass
