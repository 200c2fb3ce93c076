"""The command of a rank's process, which only rank 0 starts."""

import sys

from shmllm.config.processes import run_to_end
from shmllm.parallel.rank import run

if __name__ == "__main__":
    run_to_end(lambda: run(sys.argv[1:]))
