"""The process of a rank whose GPU is a fake one; see `shmllm.parallel.rank`.

`python -m support.fake_gpu_rank` gets the arguments of `python -m shmllm.parallel`.
"""

from __future__ import annotations

import sys

from support import fast_interpreter
from support.fake_gpu import FakeGpu, eager
from support.fake_gpu_sharing import FakeGpuSharing

from shmllm.parallel import gpu_rank
from shmllm.parallel.gpu_memory import GpuGroupMemory
from shmllm.parallel.rank import run


def main() -> int:
    fast_interpreter.install()
    with FakeGpu(eager) as device:
        gpu_rank.make_device = lambda index: device
        GpuGroupMemory.make_sharing = FakeGpuSharing
        return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
