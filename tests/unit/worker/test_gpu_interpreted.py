"""Runs the tests of the GPU engine on the fake GPU, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.interpreting import check_interpreted, files

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.parametrize("name", files(FOLDER))
def test_interpreted(name: str) -> None:
    check_interpreted(FOLDER, name, "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("name", files(FOLDER))
def test_interpreted_at_length(name: str) -> None:
    check_interpreted(FOLDER, name, "slow")
