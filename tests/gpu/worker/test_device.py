"""`CudaDevice` on a GPU."""

from __future__ import annotations

from conformance.device import DeviceConformance


class TestCudaDevice(DeviceConformance):
    pass
