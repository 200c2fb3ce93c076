"""Kernels before and behind a step's layers, interpreted."""

from __future__ import annotations

from step_conformance import StepConformance


class TestStep(StepConformance):
    pass
