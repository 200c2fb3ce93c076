"""A model's forward pass on a GPU."""

from __future__ import annotations

from conformance.gpu_program import ProgramConformance, _inference_mode, models

__all__ = ["_inference_mode", "models"]


class TestProgram(ProgramConformance):
    pass
