"""Each device's runner loads only its own compiler and its own kernels."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CPU_ONLY = {"llvmlite", "shmllm_kernels.cpu", "shmllm.worker.cpu"}
GPU_ONLY = {"triton", "shmllm_kernels.gpu", "shmllm.worker.gpu"}

PROGRAM = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(json.dumps(list(sys.modules)))
"""


def modules_after_importing(*names: str) -> list[set[str]]:
    """The modules that a new process has loaded after each of these imports, in this order."""
    command = [sys.executable, "-c", PROGRAM, *names]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


def test_a_cpu_s_runner_loads_no_module_of_a_gpu_s():
    before, modules = modules_after_importing(
        "shmllm.worker.make_runner", "shmllm.worker.cpu.runner"
    )
    assert not before & (CPU_ONLY | GPU_ONLY)
    assert modules >= CPU_ONLY
    assert not modules & GPU_ONLY
    assert "transformers" not in modules


def test_a_gpu_s_runner_loads_no_module_of_a_cpu_s():
    (modules,) = modules_after_importing("shmllm.worker.gpu.runner")
    assert modules >= GPU_ONLY
    assert not modules & CPU_ONLY
    assert "transformers" not in modules


@pytest.mark.slow
def test_a_rank_loads_only_the_modules_of_its_device():
    (modules,) = modules_after_importing("shmllm.parallel.gpu_rank")
    assert modules >= GPU_ONLY
    assert not modules & CPU_ONLY
    before, modules = modules_after_importing("shmllm.parallel.rank", "shmllm.parallel.cpu_rank")
    assert not before & (CPU_ONLY | GPU_ONLY)
    assert modules >= CPU_ONLY
    assert not modules & GPU_ONLY
