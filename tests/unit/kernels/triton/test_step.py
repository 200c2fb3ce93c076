"""Tests the kernels before and after a step's layers under Triton's interpreter."""

from __future__ import annotations

from conformance.step_kernels import StepConformance


class TestStep(StepConformance):
    pass
