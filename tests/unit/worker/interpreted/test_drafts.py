"""Drafted tokens in a whole engine on the fake GPU."""

from __future__ import annotations

from conformance.gpu_drafts import DraftsConformance, directory

__all__ = ["directory"]


class TestDrafts(DraftsConformance):
    pass
