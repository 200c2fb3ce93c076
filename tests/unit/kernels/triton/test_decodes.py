"""Tests the kernels of decode steps under Triton's interpreter."""

from __future__ import annotations

from conformance.decode_attention_kernel import DecodeAttentionConformance
from conformance.expert_rows_kernel import ExpertRowsConformance
from conformance.few_rows_kernel import FewRowsConformance, RowAdaptersConformance
from conformance.single_row_kernel import PackedRowConformance, SingleRowConformance
from conformance.weights_ahead_kernel import WeightsAheadConformance


class TestSingleRow(SingleRowConformance):
    pass


class TestFewRows(FewRowsConformance):
    pass


class TestRowAdapters(RowAdaptersConformance):
    pass


class TestExpertRows(ExpertRowsConformance):
    pass


class TestPackedRow(PackedRowConformance):
    pass


class TestDecodeAttention(DecodeAttentionConformance):
    pass


class TestWeightsAhead(WeightsAheadConformance):
    pass
