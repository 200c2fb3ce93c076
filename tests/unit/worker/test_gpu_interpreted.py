"""Runs the tests of the GPU engine on the fake GPU, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.interpreting import assert_nothing_is_collected_compiled, check_interpreted, files

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.parametrize("name", files(FOLDER))
def test_interpreted(name: str) -> None:
    check_interpreted(FOLDER, name, "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("name", files(FOLDER))
def test_interpreted_at_length(name: str) -> None:
    check_interpreted(FOLDER, name, "slow")


def test_none_of_them_is_collected_where_triton_compiles() -> None:
    assert_nothing_is_collected_compiled(FOLDER)
