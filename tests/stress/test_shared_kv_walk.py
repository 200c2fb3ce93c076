"""Long random walks over a shared prefix cache: see tests/process/test_shared_kv_walk.py.

SHMLLM_KV_ROUNDS sets how many stops and kills (10,000, in five minutes), SHMLLM_TEST_SEED repeats
what was chosen.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from support.programs import environment_of_test_files

pytestmark = pytest.mark.stress

NUM_ROUNDS = int(os.environ.get("SHMLLM_KV_ROUNDS", "10000"))
SEED = int(os.environ.get("SHMLLM_TEST_SEED", str(time.time_ns() % 10**9)))


@pytest.mark.parametrize("num_engines", [2, 4])
def test_borrowed_blocks_keep_their_data(num_engines: int) -> None:
    print(f"\nseed {SEED}", flush=True)
    command = [sys.executable, "-m", "support.kv_walks"]
    numbers = map(str, (SEED, num_engines, NUM_ROUNDS))
    subprocess.run([*command, *numbers], env=environment_of_test_files(), check=True)
