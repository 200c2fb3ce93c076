"""What tests of real processes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.engines import named_engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of an engine with the bundled model, one for all tests of a file: starting an engine
    takes longer than most of them."""
    with named_engine(tmp_path_factory.mktemp("engine")) as (name, _):
        yield name
