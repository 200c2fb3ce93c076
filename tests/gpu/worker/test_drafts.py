"""Tests drafted tokens in a whole engine on a GPU."""

from __future__ import annotations

from conformance.gpu_drafts import DraftsConformance, directory

__all__ = ["directory"]


class TestDrafts(DraftsConformance):
    pass
