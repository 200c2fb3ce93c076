"""A random walk of engines, without a model, over a shared prefix cache, with kills and stops.

A borrowed block always has the data of its key; at the end no block and no file leaks.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.programs import environment_of_test_files

pytestmark = pytest.mark.process


def walk(seed: int, num_engines: int, num_rounds: int, limit_s: float) -> str:
    """Walk in a process of its own. Returns what it says of itself."""
    command = [sys.executable, "-m", "support.kv_walks"]
    done = subprocess.run(
        [*command, *map(str, (seed, num_engines, num_rounds))],
        capture_output=True,
        text=True,
        env=environment_of_test_files(),
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("seed", [1])
def test_borrowed_blocks_keep_their_data(seed: int) -> None:
    assert "actions" in walk(seed, num_engines=3, num_rounds=60, limit_s=120)
