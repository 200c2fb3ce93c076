"""CUDA's device."""

from __future__ import annotations

from device_conformance import DeviceConformance


class TestCudaDevice(DeviceConformance):
    pass
