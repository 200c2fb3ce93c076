"""Every kernel launch compiles for GPUs, fits into their shared memory and does not spill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
SPILLED_BYTES = 64
"""The stack bytes of a few registers that a long prologue spills; a loop that spills needs more."""
ONE_STAGE = {80: ["x256 512 "], 90: []}
"""Attention launches for which `configs` has one stage, without loads ahead of their use."""


def launches(capability: int, *arguments: str, cache: Path) -> list[dict[str, object]]:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    search = os.pathsep.join([str(TESTS), *sys.path])
    done = subprocess.run(
        [sys.executable, str(TESTS / "support/kernel_launches.py"), str(capability), *arguments],
        env=kept | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": search},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(found: list[dict[str, object]], capability: int) -> None:
    for kernel in found:
        print(kernel)
        assert kernel["shared_bytes"] <= SHARED_BYTES[capability], kernel
        assert not kernel["is_double"], kernel
        if "float32" not in kernel["kernel"]:
            assert kernel["stack_bytes"] <= SPILLED_BYTES, kernel
    attention = [kernel for kernel in found if "float32" not in kernel["kernel"]]
    attention = [kernel for kernel in attention if kernel["kernel"].endswith(" attend")]
    for kernel in attention:
        has_one_stage = any(part in kernel["kernel"] for part in ONE_STAGE[capability])
        assert has_one_stage or kernel["async_copies"], f"loads are not pipelined: {kernel}"
    assert all(kernel["mma"] or kernel["wgmma"] for kernel in attention)
    if capability == 90:
        prefill = [kernel for kernel in attention if " 512 " in kernel["kernel"]]
        assert prefill
        assert all(kernel["wgmma"] for kernel in prefill), "Hopper's instruction wgmma is not used"


def test_launches_compile_for_hopper(tmp_path: Path) -> None:
    found = launches(90, cache=tmp_path)
    names = {str(kernel["kernel"]).split()[-1] for kernel in found}
    assert {"_rms_norm", "_silu_and_mul", "_rope_write", "attend", "merge_splits"} <= names
    assert {"choose_tokens", "_top_scores", "_copy_rows", "_rope_tables", "_unpack_step"} <= names
    check(found, 90)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_all_configurations_compile(capability: int, tmp_path: Path) -> None:
    check(launches(capability, "all", cache=tmp_path), capability)
