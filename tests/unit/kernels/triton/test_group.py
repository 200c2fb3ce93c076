"""Tests the kernels in which ranks meet under Triton's interpreter."""

from __future__ import annotations

from conformance.group_kernels import GroupConformance, WaitingConformance


class TestGroup(GroupConformance):
    pass


class TestWaiting(WaitingConformance):
    pass
