"""What tests of real processes share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from support.engines import named_engine
from support.forked_engines import forked_engines

STARTED_BY_EXEC = (
    "test_death.py",
    "test_exec.py",
    "test_fork.py",
    "test_image_engines.py",
    "test_interrupts.py",
    "test_kill_matrix.py",
    "test_launch.py",
    "test_plugins.py",
    "test_quantized_engines.py",
    "test_rank_process.py",
    "test_shared_kv.py",
    "test_shared_kv_disk.py",
    "test_shared_kv_ranks.py",
    "test_sleep_rounds.py",
    "test_sleeping_engines.py",
    "test_truncated_checkpoint.py",
)
"""Files about the start and the end of processes, their memory, and what engines must agree on."""


@pytest.fixture(scope="module", autouse=True)
def starts(request: pytest.FixtureRequest) -> Iterator[None]:
    """How engines start that the test's process starts itself; programs always use exec."""
    with nullcontext() if request.path.name in STARTED_BY_EXEC else forked_engines():
        yield


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of an engine with the bundled model, one for all tests of a file: starting an engine
    takes longer than most of them."""
    with named_engine(tmp_path_factory.mktemp("engine")) as (name, _):
        yield name
