"""The inputs of a step, on the fake GPU."""

from __future__ import annotations

from conformance.device_inputs import InputsConformance


class TestInputs(InputsConformance):
    pass
