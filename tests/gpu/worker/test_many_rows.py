"""Steps whose products are launches for many rows, on a GPU."""

from __future__ import annotations

import pytest
from conformance.gpu_many_rows import ManyRowsStepsConformance, launched
from conformance.gpu_program import _inference_mode, models

from shmllm_kernels.gpu.configs import has_dependent_launches

__all__ = ["_inference_mode", "launched", "models"]


class TestManyRowsSteps(ManyRowsStepsConformance):
    @pytest.fixture(autouse=True)
    def _needs_a_tensor_memory_accelerator(self, gpu_device) -> None:
        if not has_dependent_launches(gpu_device.torch_device):
            pytest.skip("the kernel needs compute capability 9.0")
