"""Folders of tests for Triton's interpreter have no test for a process in which it compiles."""

from __future__ import annotations

from pathlib import Path

from support.interpreting import assert_nothing_is_collected_compiled

UNIT = Path(__file__).parent


def test_nothing_is_collected_where_triton_compiles() -> None:
    assert_nothing_is_collected_compiled(UNIT / "kernels/triton", UNIT / "worker/interpreted")
