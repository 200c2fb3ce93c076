"""Runs the tests of the Triton kernels in a process with Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.interpreting import assert_nothing_is_collected_compiled, check_interpreted, files

FOLDER = Path(__file__).parent / "triton"


@pytest.mark.parametrize("name", files(FOLDER))
def test_interpreted(name: str) -> None:
    check_interpreted(FOLDER, name, "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("name", files(FOLDER))
def test_slow_tests_interpreted(name: str) -> None:
    check_interpreted(FOLDER, name, "slow")


def test_without_the_interpreter_no_test_is_collected() -> None:
    assert_nothing_is_collected_compiled(FOLDER)
