"""Runs the tests of the Triton kernels in a process with Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.interpreting import check_interpreted, files

FOLDER = Path(__file__).parent / "triton"


@pytest.mark.parametrize("name", files(FOLDER))
def test_interpreted(name: str) -> None:
    check_interpreted(FOLDER, name, "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("name", files(FOLDER))
def test_slow_tests_interpreted(name: str) -> None:
    check_interpreted(FOLDER, name, "slow")
