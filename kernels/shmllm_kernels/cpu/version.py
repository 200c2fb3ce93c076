"""What decides the bits that these kernels compute, beside their inputs."""

from __future__ import annotations

import hashlib
from pathlib import Path

import llvmlite
from llvmlite import binding

from shmllm_kernels.cpu.simd import FEATURES


def version() -> str:
    """Returns a digest, in hexadecimal digits, of the sources, the compiler and the CPU."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    cpu = binding.get_host_cpu_name(), FEATURES.flatten(), llvmlite.__version__
    digest.update("\0".join(cpu).encode())
    return digest.hexdigest()
