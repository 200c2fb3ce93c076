"""Kernels of single rows and of a step's heads, interpreted."""

from __future__ import annotations

from conformance.rope_write_kernel import RopeWriteConformance
from conformance.row_kernels import RowKernelsConformance


class TestRowKernels(RowKernelsConformance):
    pass


class TestRopeWrite(RopeWriteConformance):
    pass
