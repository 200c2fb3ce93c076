"""Runs a module in which `import vllm` finds shmllm: `python -m shmllm.compat MODULE [ARGS]`."""

from __future__ import annotations

import runpy
import sys

from shmllm.compat import vllm
from shmllm.errors import ShmLLMError


def main() -> None:
    """Installs the `vllm` modules and runs the module that the arguments name."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m shmllm.compat MODULE [ARGUMENTS...]")
    try:
        vllm.install()
    except ShmLLMError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
