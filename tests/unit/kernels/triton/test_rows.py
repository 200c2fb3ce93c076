"""Kernels of single rows and of a step's heads, interpreted."""

from __future__ import annotations

from rope_write_conformance import RopeWriteConformance
from row_kernels_conformance import RowKernelsConformance


class TestRowKernels(RowKernelsConformance):
    pass


class TestRopeWrite(RopeWriteConformance):
    pass
