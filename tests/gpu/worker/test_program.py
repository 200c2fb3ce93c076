"""A model's forward pass on a GPU."""

from __future__ import annotations

from conformance.gpu_program import ProgramConformance, _few_processors, models

__all__ = ["_few_processors", "models"]


class TestProgram(ProgramConformance):
    pass
