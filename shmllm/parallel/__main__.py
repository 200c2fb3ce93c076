"""The command of a rank's process, which only rank 0 starts."""

import sys

from shmllm.parallel.rank import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
