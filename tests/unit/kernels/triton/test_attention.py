"""Tests paged attention under Triton's interpreter."""

from __future__ import annotations

from conformance.attention_kernels import AttentionConformance


class TestAttention(AttentionConformance):
    pass
