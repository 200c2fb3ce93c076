"""The tests of the GPU engine on a GPU; the fake GPU passes the same tests."""

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
