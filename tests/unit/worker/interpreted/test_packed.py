"""Models with packed weights through the Triton kernels, on the fake GPU."""

from __future__ import annotations

from conformance.gpu_packed import PackedProgramConformance, _inference_mode

__all__ = ["_inference_mode"]


class TestPackedProgram(PackedProgramConformance):
    pass
