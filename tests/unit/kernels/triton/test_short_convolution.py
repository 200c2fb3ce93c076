"""Tests the kernel of gated short convolutions under Triton's interpreter."""

from __future__ import annotations

from conformance.short_convolution_kernels import ShortConvolutionConformance


class TestShortConvolution(ShortConvolutionConformance):
    pass
