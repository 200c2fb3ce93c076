"""Tests the row kernels and the rotary embedding kernel under Triton's interpreter."""

from __future__ import annotations

from conformance.altup_kernels import AltUpConformance
from conformance.connection_kernels import ConnectionConformance
from conformance.relation_kernels import RelationConformance
from conformance.rope_write_kernel import RopeWriteConformance
from conformance.row_kernels import RowKernelsConformance


class TestRowKernels(RowKernelsConformance):
    pass


class TestAltUp(AltUpConformance):
    pass


class TestConnections(ConnectionConformance):
    pass


class TestRelations(RelationConformance):
    pass


class TestRopeWrite(RopeWriteConformance):
    pass
