"""Encoders on a GPU."""

from __future__ import annotations

from conformance.gpu_encoders import (
    EncoderEngineConformance,
    EncoderStepsConformance,
    _inference_mode,
    encoders,
)

__all__ = ["_inference_mode", "encoders"]


class TestEncoderSteps(EncoderStepsConformance):
    pass


class TestEncoderEngine(EncoderEngineConformance):
    pass
