"""Encoders on a GPU."""

from __future__ import annotations

from conformance.gpu_encoders import (
    EncoderEngineConformance,
    EncoderFamiliesConformance,
    EncoderStepsConformance,
    _inference_mode,
    encoders,
    of_family,
)

__all__ = ["_inference_mode", "encoders", "of_family"]


class TestEncoderSteps(EncoderStepsConformance):
    pass


class TestEncoderFamilies(EncoderFamiliesConformance):
    pass


class TestEncoderEngine(EncoderEngineConformance):
    pass
