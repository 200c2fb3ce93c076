"""Each device's runner loads only its own compiler and its own kernels."""

from __future__ import annotations

import subprocess
import sys

import pytest

CPU_ONLY = {"llvmlite", "shmllm_kernels.cpu", "shmllm.worker.cpu"}
GPU_ONLY = {"triton", "shmllm_kernels.gpu", "shmllm.worker.gpu"}


def modules_after_importing(name: str) -> set[str]:
    """The modules that a new process has loaded after it imports the module `name`."""
    program = f"import sys, {name}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("name", "loaded", "not_loaded"),
    [
        ("shmllm.worker.make_runner", set(), CPU_ONLY | GPU_ONLY),
        ("shmllm.worker.cpu.runner", CPU_ONLY, GPU_ONLY),
        ("shmllm.worker.gpu.runner", GPU_ONLY, CPU_ONLY),
    ],
    ids=["make_runner", "cpu", "gpu"],
)
def test_a_runner_loads_no_module_of_the_other_device(name, loaded, not_loaded):
    modules = modules_after_importing(name)
    assert modules >= loaded
    assert not modules & not_loaded
