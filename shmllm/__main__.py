"""Runs the command line: `python -m shmllm` is the same as `shmllm`."""

from shmllm.cli.entry import main

if __name__ == "__main__":
    main()
