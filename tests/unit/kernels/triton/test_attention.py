"""Paged attention, interpreted."""

from __future__ import annotations

from attention_conformance import AttentionConformance


class TestAttention(AttentionConformance):
    pass
