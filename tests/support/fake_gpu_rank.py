"""The process of a rank whose GPU is a fake one; see `shmllm.parallel.rank`.

`python -m support.fake_gpu_rank` gets the arguments of `python -m shmllm.parallel`. The variables
LARGE_BYTES and BLOCK replace the constants of these names in `worker.gpu.group` and in
`shmllm_kernels.gpu.group`.
"""

from __future__ import annotations

import os
import sys

from support import fast_interpreter
from support.fake_gpu import FakeGpu, eager
from support.fake_gpu_sharing import FakeGpuSharing

from shmllm.parallel import gpu_rank
from shmllm.parallel.gpu_memory import GpuGroupMemory
from shmllm.parallel.rank import run
from shmllm.worker.gpu import group
from shmllm_kernels.gpu import group as kernels


def main() -> int:
    fast_interpreter.install()
    with FakeGpu(eager) as device:
        gpu_rank.make_device = lambda index: device
        GpuGroupMemory.make_sharing = FakeGpuSharing
        group.LARGE_BYTES = int(os.environ.get("LARGE_BYTES", group.LARGE_BYTES))
        kernels.BLOCK = int(os.environ.get("BLOCK", kernels.BLOCK))
        return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
