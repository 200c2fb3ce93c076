"""Paged attention, interpreted."""

from __future__ import annotations

from conformance.attention_kernels import AttentionConformance


class TestAttention(AttentionConformance):
    pass
