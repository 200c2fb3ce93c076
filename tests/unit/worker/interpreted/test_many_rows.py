"""Steps whose products are launches for many rows, on the fake GPU."""

from __future__ import annotations

from conformance.gpu_lora import Adapted, LoraEngineConformance, adapted
from conformance.gpu_many_rows import ManyRowsStepsConformance, launched
from conformance.gpu_program import _inference_mode, models

from shmllm.worker.gpu.products import GpuProducts

__all__ = ["_inference_mode", "adapted", "launched", "models"]


class TestManyRowsSteps(ManyRowsStepsConformance):
    pass


def test_what_adapters_add_comes_before_the_activation(
    gpu_device, adapted: Adapted, monkeypatch
) -> None:
    """Where there are adapters the activation is a launch of its own, in all steps."""
    monkeypatch.setattr(GpuProducts, "activated", None)
    greedy = LoraEngineConformance().test_greedy_tokens_are_those_of_the_merged_models
    greedy(adapted, gpu_device, "FULL_AND_PIECEWISE", 2)
