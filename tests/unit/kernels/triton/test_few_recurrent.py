"""Tests the kernels of recurrent layers of few tokens under Triton's interpreter."""

from __future__ import annotations

from conformance.few_recurrent_kernels import FewRecurrentConformance


class TestFewRecurrent(FewRecurrentConformance):
    pass
