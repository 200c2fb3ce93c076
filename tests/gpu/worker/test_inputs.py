"""The inputs of a step, on a GPU."""

from __future__ import annotations

from conformance.device_inputs import InputsConformance


class TestInputs(InputsConformance):
    pass
