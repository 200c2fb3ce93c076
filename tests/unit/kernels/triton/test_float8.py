"""Tests FP8 keys and values under Triton's interpreter, which runs the integer operations."""

from conformance.float8_kernels import (
    Float8AttentionConformance,
    Float8ConversionConformance,
    Float8DecodeConformance,
    Float8WriteConformance,
)


class TestConversion(Float8ConversionConformance):
    pass


class TestWrite(Float8WriteConformance):
    pass


class TestAttention(Float8AttentionConformance):
    pass


class TestDecodes(Float8DecodeConformance):
    pass
