"""Kernels before and behind a step's layers, interpreted."""

from __future__ import annotations

from conformance.step_kernels import StepConformance


class TestStep(StepConformance):
    pass
