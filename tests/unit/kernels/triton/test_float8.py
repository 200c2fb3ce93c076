"""Tests FP8 keys and values under Triton's interpreter, which runs the integer operations."""

from __future__ import annotations

import torch
from conformance.attention_kernels import MIXED, Case, Launch
from conformance.float8_kernels import (
    Float8AttentionConformance,
    Float8ConversionConformance,
    Float8DecodeConformance,
    Float8LatentConformance,
    Float8WriteConformance,
)


class TestConversion(Float8ConversionConformance):
    pass


class TestWrite(Float8WriteConformance):
    pass


class TestAttention(Float8AttentionConformance):
    def test_the_bits_are_those_of_rounded_numbers_in_the_models_dtype(self, draw, dtype):
        """On a GPU the tensor cores add in another order."""
        launch = Launch(draw, dtype, Case(MIXED, window=9, has_float8=True))
        got = launch.run()
        launch.cache = launch.cache.to(dtype)
        assert torch.equal(launch.run(), got)


class TestDecodes(Float8DecodeConformance):
    pass


class TestLatents(Float8LatentConformance):
    pass
