"""The GPU engine on a GPU, with the tests that its double passes too."""

from __future__ import annotations

import pytest
import torch

from shmllm.worker.gpu.device import CudaDevice


@pytest.fixture
def gpu_device() -> CudaDevice:
    return CudaDevice()


@pytest.fixture
def device(gpu_device: CudaDevice) -> torch.device:
    return gpu_device.torch_device
