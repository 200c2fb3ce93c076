"""Tests the kernels of latent attention under Triton's interpreter."""

from __future__ import annotations

from conformance.latent_heads_kernels import LatentHeadsConformance
from conformance.latent_kernels import LatentKernelsConformance


class TestLatentKernels(LatentKernelsConformance):
    pass


class TestLatentHeads(LatentHeadsConformance):
    pass
