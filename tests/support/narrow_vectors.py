"""Multiplies packed matrices in a process whose kernels have narrower vectors than this CPU's.

    python narrow_vectors.py LANES KIND...

It exits with an error if a weight has other bits than `packed_matrices` decodes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from llvmlite import binding


class _Narrow(binding.FeatureMap):  # type: ignore[misc]
    """The features of this CPU without AVX512. Vectors have 8 lanes, or 4 if `hides_avx`; their
    instructions may still be AVX, since older ones do not convert float16."""

    hides_avx = False

    def get(self, name: str, default: Any = None) -> Any:
        return False if name == "avx" and self.hides_avx else super().get(name, default)


def _narrow(lanes: int) -> None:
    features = _Narrow(binding.get_host_cpu_features())
    for name in features:
        if name.startswith(("avx512", "avx10", "amx")):
            features[name] = False
    features.hides_avx = lanes == 4
    binding.get_host_cpu_features = lambda: features


def _check(kind: str) -> None:
    from support.cpu_kernels import run_kernel
    from support.packed_matrices import depth_step, drawn_matrix, values_of

    from shmllm_kernels.cpu.products import MULTIPLY

    step = depth_step(kind)
    for k in sorted({-(-k // step) * step for k in (40, 96, 1152)}):
        matrix = drawn_matrix(7, k, kind)
        for rows in (1, 200):
            x = torch.eye(k)[torch.randperm(k)[:rows]]
            out = torch.full((len(x), 7), float("nan"))
            run_kernel(
                MULTIPLY["float32", kind, "bfloat16"], len(x), x, 4 * k, out, 28, matrix.integers,
                7, k, matrix.scales, 0,
            )  # fmt: skip
            if not torch.equal(out, x @ values_of(matrix).T):
                sys.exit(f"a weight of {kind} has wrong bits, k={k}, rows={rows}")


def main() -> None:
    """Checks the kinds that the command line names."""
    lanes = int(sys.argv[1])
    _narrow(lanes)
    from shmllm_kernels.cpu.simd import LANES

    if lanes != LANES:
        sys.exit(f"this CPU has vectors of {LANES}")
    for kind in sys.argv[2:]:
        _check(kind)


if __name__ == "__main__":
    main()
