"""A step's inputs, sent to a GPU."""

from __future__ import annotations

from inputs_conformance import InputsConformance


class TestInputs(InputsConformance):
    pass
