"""All kernels of the package on a GPU; `pytest -m gpu`."""

from __future__ import annotations

from attention_conformance import AttentionConformance
from rope_write_conformance import RopeWriteConformance
from row_kernels_conformance import RowKernelsConformance
from sampling_conformance import SamplingConformance
from step_conformance import StepConformance


class TestAttention(AttentionConformance):
    pass


class TestRopeWrite(RopeWriteConformance):
    pass


class TestRowKernels(RowKernelsConformance):
    pass


class TestSampling(SamplingConformance):
    pass


class TestStep(StepConformance):
    pass
