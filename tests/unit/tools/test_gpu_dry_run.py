"""A dry run launches what the engine launches on a device, and compiles it for later launches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]

TOOLS = str(Path(__file__).resolve().parents[3] / "tools")
# A dry run changes its process for good.
PROGRAM = """
import json, sys
from dataclasses import replace
sys.path.insert(0, sys.argv[1])
import torch
from gpu import compile_part, dry_run
from gpu.settings import REHEARSAL
from triton import knobs

where, chosen = sys.argv[2], json.loads(sys.argv[3])
launches = dry_run.Launches(lambda number: number in chosen)
with dry_run.dry_run(dry_run.Card((9, 0), 132), launches, torch.device(where)) as device:
    for name in ("tiles", "1b", "packed"):
        compile_part.launch(REHEARSAL, name, device)
kernels = sorted(map(list, launches.numbers))
print(json.dumps([kernels, launches.seconds, launches.errors]))
"""


def dry_run(cache: Path, temporary: Path, where: str, chosen: list[int]) -> Any:
    command = [sys.executable, "-c", PROGRAM, TOOLS, where, json.dumps(chosen)]
    done = subprocess.run(
        command,
        env=os.environ | {"TRITON_CACHE_DIR": str(cache), "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_tensors_without_contents_launch_the_kernels_of_real_ones(tmp_path):
    """Sizes, strides and the alignment of addresses choose the variant of a kernel. What a dry run
    has compiled, a later one finds on the disk."""
    cache, temporary = tmp_path / "cache", tmp_path / "temporary"
    temporary.mkdir()
    kernels, seconds, errors = dry_run(cache, temporary, "meta", [0])
    assert (len(seconds), errors) == (1, {})
    compiled = set(cache.iterdir())
    assert compiled
    real, _, _ = dry_run(cache, temporary, "cpu", [0])
    assert set(cache.iterdir()) == compiled
    assert real == kernels
    assert {"attend", "merge_splits", "choose_tokens", "_linear"} <= {name for name, _ in real}
